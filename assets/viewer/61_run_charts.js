// The three charts that always stand under the stage, and the table of the same numbers. `host` is the viewer around.
const ROW_FORMULAS = {acceptance: ['num_accepted_draft_tokens', 'tokens_per_step'], latency: ['step_times'], progress: ['speed_up']};

function makeCharts(host, row, tableBox) {
  let numResets = 0;

  function span() {           // decode steps [from, to) that the per-step charts show
    const n = host.run.records.length;
    if (host.view.zoom) return [max(0, floor(host.view.zoom[0]) - 2), min(n, ceil(host.view.zoom[1]) + 1)];
    const to = host.view.live ? n : min(n, max(WINDOW, host.run.rows.decode[host.view.at] + WINDOW / 2));
    return [max(0, to - WINDOW), to];
  }

  function series(name) {     // the `meta` of a trace in Python → its numbers
    const {run} = host, {rows} = run, points = ([x, y]) => ({x, y});
    if (name === 'speculative') return points(thin([0].concat(rows.seconds.filter(s => s > 0)),
        [run.numTokens - run.decodeTokens].concat(rows.tokens.filter((_, i) => rows.seconds[i] > 0))));
    if (name === 'plain') return points(thin(run.plain.map(token => max(0, token.t_ms / 1000)), run.plain.map((_, i) => i + 1)));
    const [from, to] = span(), stride = max(1, ceil((to - from) / MAX_POINTS)), x = [], y = [];
    for (let k = from; k < to; k += stride) {
      const i = run.records[k];
      x.push(k + 1);
      y.push(name === 'plain_ms' ? run.plainMs(i) : rows[name] ? rows[name][i] : null);
    }
    return {x, y};
  }

  function finish(chart, figure, data, layout) {
    const {run, view} = host, isPerStep = layout.meta === 'per step';
    layout.uirevision = numResets;
    let isCut = false;
    if (isPerStep) {
      const [from, to] = span();
      layout.xaxis.range = view.zoom || [from + 0.5, max(from + 20, to) + 0.5];
      isCut = chart.name === 'acceptance' && capped(data, layout);
      const cursor = run.steps[view.at] && !isPrefill(run.steps[view.at]) ? run.rows.decode[view.at] : 0;
      layout.shapes = cursor && !view.live ? [mark(cursor, layout)] : [];
    } else if (!view.live && run.steps[view.at] && run.rows.seconds[view.at] > 0 && host.root.classList.contains('replay'))
      layout.shapes = [mark(run.rows.seconds[view.at], layout)];
    layout.annotations = (figure.layout.annotations || NONE).map(note => placed(note, data, layout)).filter(Boolean);
    return isCut ? {unjudged: ' (' + WORDS.cutUnjudged + ')'} : {};
  }

  function opened(chart) {
    if (chart.name === 'progress') return;
    chart.plot.on('plotly_click', event => host.pick(host.run.records[event.points[0].x - 1]));
    chart.plot.on('plotly_relayout', change => {
      if ('xaxis.range[0]' in change) host.view.zoom = [change['xaxis.range[0]'], change['xaxis.range[1]']];
      plots.draw();
    });
    chart.plot.on('plotly_doubleclick', () => { host.view.zoom = null; numResets++; plots.draw(); });
  }

  const mark = (x, layout) => ({type: 'line', xref: 'x', yref: 'paper', x0: x, x1: x, y0: 0, y1: 1,
      line: {width: 1.5, dash: 'dot', color: layout.font.color}});

  function capped(data, layout) {            // many unjudged nodes of a tree must not flatten what was judged
    const of = name => (data.find(trace => trace.meta === name) || {y: NONE}).y, accepted = of('accepted'), rejected = of('rejected'),
        unjudged = of('unjudged'), mean = of('tokens_per_step');
    let judged = 1, all = 1;
    accepted.forEach((n, i) => { judged = max(judged, n + rejected[i], mean[i] || 0); all = max(all, n + rejected[i] + unjudged[i], mean[i] || 0); });
    const isCut = all > 1.9 * judged + 1;
    layout.yaxis.range = [0, (isCut ? judged * 1.35 + 0.6 : all * 1.12)];
    return isCut;
  }

  function placed(note, data, layout) {      // an annotation of the figure with its place and number, or null while there is none
    if (note.name === 'speed_up') {
      const value = host.run.stats ? host.run.stats.speed_up : (host.run.speedUp() || {}).value;
      return finite(value) ? {...note, visible: true, text: note.text.replace('{}', value.toFixed(2))} : null;
    }
    const trace = data.find(one => one.meta === note.name);
    let i = trace ? trace.y.length - 1 : -1;
    if (layout.meta !== 'per step' && i > 0) i = floor(i * 0.55);       // beside the middle of a rising line there is always room
    while (i >= 0 && !finite(trace.y[i])) i--;
    if (i < 0 || trace.y.length < 2) return null;
    const extra = layout.meta === 'per step' ? {xref: 'paper', x: 1, yshift: 2} : note.name === 'plain'
        ? {x: trace.x[i], xanchor: 'left', xshift: 4} : {x: trace.x[i], xshift: -4};
    return {...note, visible: true, y: trace.y[i], text: note.text.replace('{}', trace.y[i].toFixed(2)), ...extra};
  }

  function drawTable() {
    if (tableBox.hidden) return;
    const [from, to] = span(), table = el('table'), head = el('tr'), number = x => finite(x)
        ? (Number.isInteger(x) ? String(x) : x.toFixed(2)) : WORDS.dash;
    head.append(...WORDS.tableHead.map(text => set(el('th', null, text), {scope: 'col'})));
    table.append(head);
    for (let k = from; k < to; k++) {
      const i = host.run.records[k], r = host.run.rows, line = el('tr');
      for (const value of [k + 1, r.accepted[i], r.rejected[i], r.unjudged[i], r.tokens_per_step[i], r.draft_ms[i], r.verify_ms[i],
          r.other_ms[i], host.run.plainMs(i)]) line.append(el('td', 'sv-num', number(value)));
      table.append(line);
    }
    tableBox.replaceChildren(table);
  }

  const plots = makePlots(host, row, {series, finish, opened, formulas: name => ROW_FORMULAS[name] || NONE,
    names: figures => Object.keys(figures).filter(name => ['per step', 'whole run'].includes(figures[name].layout.meta)),
    key: () => [host.run.id, host.size(), host.run.plain.length, host.view.at, host.view.live, host.view.zoom, numResets,
        host.run.stats ? 1 : 0].join()});
  const all = [plots];        // views with charts of their own join in, to get each run's figures
  let last = null;
  host.addPlots = more => { all.push(more); if (last) more.prepare(last); };
  return {...plots, drawTable, prepare(message) { if (message.figures) last = message; for (const one of all) one.prepare(message); }};
}
