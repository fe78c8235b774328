// The view Charts: acceptance by depth, tokens per step, cost of verifying, prediction, memory.
WORDS.charts = {
  title: 'Charts', lead: 'The whole run in five pictures. Each “i” opens the formula and its source.',
  table: 'Verification was measured on that machine for texts of {n} tokens ({date}).',
  steps: 'The cost of verifying was not measured beforehand; this curve is an estimate from the run’s own steps.',
  noCost: 'Not known: this needs the plain run’s times, and steps that were not shared with other answers.',
  noDraft: 'Nothing was drafted in this run.', noSteps: 'No decode step yet.',
  noMemory: 'The recording does not say how much memory was held.', memory: 'The cache held {n} entries at the end of this run; one takes {kb} kB.',
  names: {target_bytes: 'target', drafter_bytes: 'drafter', cache: 'target’s cache', drafter_cache: 'drafter’s cache'},
  speedUps: {measured: 'measured', predicted: 'predicted', free: 'if verifying<br>were free'},
  predicted: 'The prediction uses {alpha} tokens per step and {costs}.', costs: {measured: 'the measured table of costs', steps: 'the median times of this run’s own steps'},
  depths: {tree: 'A tree: a depth counts as accepted if one of its branches was.', chain: 'Few guesses are judged at great depth, so the right end is noisy.'},
  regret: ' The autopilot reached {share} of what the best fixed length, K = {k}, would have: an estimate from this run’s own positions.',
  absent: 'This page was saved without its charts.',
};

const CHART_FORMULAS = {by_depth: ['acceptance_rate_alpha_by_depth', 'survival'], histogram: ['tokens_per_step_histogram', 'tokens_per_step'],
  verify_cost: ['verify_cost', 'break_even'], prediction: ['speed_up', 'predicted_speed_up', 'expected_tokens', 'regret'], memory: ['memory']};

VIEWS.push({name: 'charts', title: WORDS.charts.title, mount(host) {
  const words = WORDS.charts, row = el('div', 'sv-charts'), node = box('sv-charts-view', el('p', 'sv-quiet', words.lead), row);

  function series(name, figure) {
    const {run} = host, recorded = recordedOf(run), {decode, alphas, points} = recorded;
    if (!decode.length) return null;
    const drafted = decode.filter((_, i) => recorded.levels[i].length).length;
    if (name === 'alpha') return alphas.length ? {x: alphas.map((_, i) => i + 1), y: alphas.map(one => one.accepted / one.judged),
        customdata: alphas.map(one => one.judged)} : null;
    if (name === 'survival') return {x: alphas.map((_, i) => i + 1), y: alphas.map((_, i) => recorded.accepted.filter(n => n > i).length / drafted)};
    if (name === 'num_steps') {
      const counts = [];
      for (const step of decode) counts[numTokens(step)] = (counts[numTokens(step)] || 0) + 1;
      const x = Object.keys(counts).map(Number);
      return {x, y: x.map(n => counts[n])};
    }
    if (figure === 'verify_cost') {
      if (!points.length || !drafted) return null;
      const deepest = max(4, ceil(recorded.depth * 1.6), ceil(mean(decode.map(numFed)) * 1.4)), x = Array.from({length: deepest}, (_, i) => i + 1);
      if (name === 'verify') return {x, y: x.map(n => recorded.v(n))};
      if (name === 'break_even') return {x, y: x.map(n => recorded.breakEven(n))};
      if (name === 'all_accepted') return {x: [1, deepest], y: [1, deepest]};
      if (name === 'this_run') return {x: [mean(decode.map(numFed))], y: [run.decodeTokens / run.numDecode]};
    }
    if (name === 'speed_ups') {
      const gain = run.stats ? run.stats.speed_up : (run.speedUp() || {}).value;
      if (!points.length || !finite(gain) || !drafted) return null;
      return {y: Object.values(words.speedUps), x: [gain, ownSpeedUp(recorded, 1), ownSpeedUp(recorded, 0)]};
    }
    const bytes = name === 'held_mb' ? memoryOf(run) : NONE;
    return bytes.length ? {y: bytes.map(([key]) => words.names[key]), x: bytes.map(([, n]) => n / 1e6)} : null;
  }
  const ownSpeedUp = (recorded, factor) => recorded.speedUp(recorded.depth, host.run.decodeTokens / host.run.numDecode, 1, factor);

  function memoryOf(run) {
    const given = isObject(run.meta.memory) ? run.meta.memory : {}, last = cache => {
      for (let i = run.steps.length - 1; i >= 0; i--) if (run.steps[i].kv && run.steps[i].kv[cache]) return run.steps[i].kv[cache].after;
      return 0;
    };
    const all = {target_bytes: given.target_bytes, drafter_bytes: given.drafter_bytes, cache: given.cache_bytes_per_token * last('target'),
        drafter_cache: given.drafter_cache_bytes_per_token * last('drafter')};
    return Object.entries(all).filter(([, n]) => finite(n) && n > 0);
  }

  function note(figure) {
    const {run} = host, recorded = recordedOf(run), {cost} = run.meta;
    if (!recorded.decode.length) return words.noSteps;
    if (figure !== 'memory' && figure !== 'histogram' && !recorded.depth) return words.noDraft;
    if (figure === 'by_depth') return recorded.isTree ? words.depths.tree : words.depths.chain;
    if (figure === 'verify_cost') return recorded.costs === 'measured' ? say(words.table, {n: recorded.context, date: cost.measured.slice(0, 10)})
        : recorded.costs ? words.steps : words.noCost;
    if (figure === 'prediction') return recorded.costs ? say(words.predicted, {alpha: (run.decodeTokens / run.numDecode).toFixed(2),
        costs: words.costs[recorded.costs]}) + regretOf(run) : words.noCost;
    if (figure === 'memory') {
      const last = run.steps.length && run.steps[run.steps.length - 1].kv, bytes = isObject(run.meta.memory) && run.meta.memory.cache_bytes_per_token;
      return !memoryOf(run).length ? words.noMemory : last && last.target && finite(bytes) ? say(words.memory, {n: last.target.after, kb: (bytes / 1000).toFixed(0)}) : '';
    }
    return '';
  }

  function regretOf(run) {
    const {regret, best_fixed_k: k} = run.stats || {};
    return finite(regret) && whole(k) ? say(words.regret, {share: ((1 - regret) * 100).toFixed(0) + ' %', k}) : '';
  }

  function finish(chart, figure, data, layout) {
    const {run} = host;
    if (chart.name === 'by_depth') layout.xaxis.range = [0.8, max(2, data[0].x.length) + 0.2];
    if (['by_depth', 'histogram'].includes(chart.name)) layout.xaxis.dtick = max(1, ceil(max(...data[0].x) / 8));
    if (chart.name === 'histogram') {
      const average = run.decodeTokens / run.numDecode;
      layout.xaxis.range = [0.4, max(2, ...data[0].x) + 0.6];
      layout.yaxis.range = [0, max(...data[0].y) * 1.22];
      layout.shapes = [{type: 'line', xref: 'x', yref: 'paper', x0: average, x1: average, y0: 0, y1: 0.93, line: {width: 1.5, dash: 'dot', color: layout.font.color}}];
      layout.annotations = figure.layout.annotations.map(one => ({...one, visible: true, x: average, y: 1, yref: 'paper', yanchor: 'top',
          xanchor: average > 0.75 * max(...data[0].x) ? 'right' : average < 0.3 * max(...data[0].x) ? 'left' : 'center', text: one.text.replace('{}', average.toFixed(2))}));
    } else if (chart.name === 'verify_cost') {
      const [x] = data[3].x, [y] = data[3].y;
      layout.xaxis.range = [0.7, data[1].x.length + 0.3];
      layout.yaxis.range = [0, max(y, data[1].y[data[1].y.length - 1], data[2].y[data[2].y.length - 1]) * 1.15];
      layout.xaxis.dtick = max(1, ceil(data[1].x.length / 8));
      if (x > layout.xaxis.range[1]) layout.xaxis.range[1] = x + 1;
    } else if (layout.yaxis.autorange === 'reversed') layout.xaxis.range = [0, max(chart.name === 'prediction' ? 1.1 : 0, ...data[0].x) * 1.08];
    return {};
  }

  const plots = makePlots(host, row, {absent: words.absent, series, finish, note, formulas: name => CHART_FORMULAS[name] || NONE,
    names: figures => Object.keys(figures).filter(name => figures[name].layout.meta === 'charts'),
    key: () => [host.run.id, host.size(), host.run.plain.length, host.run.stats ? 1 : 0].join()});
  host.addPlots(plots);
  return {node, draw: plots.draw};
}});
