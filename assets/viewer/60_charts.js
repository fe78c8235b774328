// Charts: figures come from Python, only numbers are filled in here. Drawn one per frame, never more than a quarter of the time. It knows
// neither steps nor runs; who fills the charts does.
let plotly = null;            // one load per page, shared by all viewers
function loadPlotly(address) {
  if (global.Plotly) return Promise.resolve();
  if (!address) return Promise.reject(new Error(WORDS.notLoaded));
  return plotly = plotly || new Promise((resolve, reject) => {
    const idle = global.requestIdleCallback || (run => setTimeout(run, 50));
    idle(() => {
      const script = el('script');
      script.src = address;
      script.onload = () => global.Plotly ? resolve() : reject(new Error(WORDS.notPlotly));
      script.onerror = () => reject(new Error(WORDS.notLoaded));
      document.head.append(script);
    }, {timeout: 2000});
  }).catch(error => { plotly = null; throw error; });
}

function thin(xs, ys) {       // every n-th point and the last one
  const stride = ceil(xs.length / MAX_POINTS);
  if (stride <= 1) return [xs, ys];
  const keep = (_, i) => i % stride === 0 || i === xs.length - 1;
  return [xs.filter(keep), ys.filter(keep)];
}
const theme = () => document.body.classList.contains('dark') ? 'dark' : 'light';
let chartsRestUntil = 0;      // for all charts of the page together

/* Charts in `row`. kit:
 *   names(figures) → the figures to show; key() → text that changes whenever a chart would;
 *   series(name, figure name) → {x, y, ...} for the trace with this `meta`, or null: the chart then shows a sentence in its place;
 *   finish(chart, figure, data, layout) → {trace meta: text after its key}, after changing data and layout where it likes;
 *   absent → a sentence for pages without charts; note(figure name) → a line under the chart; formulas(figure name) → entries of the formulas; opened(chart): drawn for the first time. */
function makePlots(host, row, kit) {
  let charts = [], figures = null, turn = null, state = 'none', numDraws = 0;
  const chartKey = () => theme() + ',' + kit.key();
  const onScreen = global.IntersectionObserver ? new IntersectionObserver(entries => {
    for (const entry of entries) {
      const chart = charts.find(one => one.box === entry.target);
      if (chart) chart.hidden = !entry.isIntersecting;
    }
    draw();
  }) : null;

  function prepare(message) {
    if (!message.figures || !message.figures.light) { if (!figures) row.replaceChildren(); return; }
    figures = message.figures;
    if (state === 'ready') { charts.forEach(chart => { chart.key = null; }); return; }
    if (state === 'loading') return;
    state = 'loading';
    row.replaceChildren(el('p', 'sv-note', WORDS.chartsLoading));
    wanted(host, row).then(() => loadPlotly(message.plotly)).then(() => {
      row.replaceChildren();
      charts = kit.names(figures.light).map(makeChart);
      state = 'ready';
      draw();
    }).catch(missing);
  }

  function makeChart(name) {
    const plot = set(el('div', 'sv-plot'), {role: 'img'}), keys = el('div', 'sv-keys'), head = el('h3'), note = el('p', 'sv-chart-note sv-quiet'),
        hint = makeHint(host, figures.light[name].layout.title.text, kit.formulas(name));
    plot.style.height = figures.light[name].layout.height + 'px';
    const frame = set(box('sv-chart', box('sv-chart-head', box('sv-chart-title', head, hint.info), keys), plot, note, hint.about), {'data-chart': name});
    row.append(frame);
    if (onScreen) onScreen.observe(frame);
    return {name, box: frame, plot, keys, head, note, key: null, drawnAt: 0, hidden: false, isNew: true};
  }

  function missing(error) {
    state = 'missing';
    row.replaceChildren(el('p', 'sv-note', say(WORDS.noCharts, {why: error.message})));
  }

  function draw() {           // one chart per frame, the longest undrawn first
    if (state === 'none' && kit.absent && !row.firstChild) row.append(el('p', 'sv-note', kit.absent));
    const stale = chart => !chart.hidden && chart.key !== chartKey();
    if (turn || state !== 'ready' || !row.offsetParent || !charts.some(stale)) return;
    turn = requestAnimationFrame(() => {
      turn = null;
      const now = performance.now(), waiting = charts.filter(stale);
      if (!waiting.length) return;
      const chart = waiting.reduce((a, b) => a.drawnAt <= b.drawnAt ? a : b),
          wait = max(chartsRestUntil, chart.drawnAt && chart.drawnAt + CHART_MS) - now;
      if (wait > 0) { turn = setTimeout(() => { turn = null; draw(); }, wait); return; }
      const isFirst = !chart.drawnAt;
      try { drawOne(chart); } catch (error) { return missing(error); }
      chartsRestUntil = isFirst ? 0 : now + min(500, CHART_SHARE * (performance.now() - now));
      draw();
    });
  }

  function drawOne(chart) {
    const figure = figures[theme()][chart.name], title = figure.layout.title.text, key = chartKey();
    if (chart.head.textContent !== title) { chart.head.textContent = title; set(chart.plot, {'aria-label': say(WORDS.chartLabel, {title})}); }
    chart.key = key; chart.drawnAt = performance.now(); numDraws++;
    chart.note.textContent = kit.note ? kit.note(chart.name) : '';
    const filled = figure.data.map(trace => kit.series(trace.meta, chart.name)), isEmpty = filled.includes(null);
    chart.plot.hidden = chart.keys.hidden = isEmpty;
    if (isEmpty) return;
    const data = figure.data.map((trace, i) => ({...trace, ...filled[i], marker: {...trace.marker, ...filled[i].marker}}));
    const layout = {...figure.layout, datarevision: key, autosize: true, title: undefined, xaxis: {...figure.layout.xaxis},
        yaxis: {...figure.layout.yaxis}};
    const cuts = kit.finish && kit.finish(chart, figure, data, layout) || {};
    global.Plotly.react(chart.plot, data, layout, {responsive: true, displaylogo: false, displayModeBar: false, doubleClick: false});
    showKeys(chart, figure, cuts);
    if (chart.isNew && kit.opened) kit.opened(chart);
    chart.isNew = false;
  }

  function showKeys(chart, figure, cuts) {
    const key = theme() + JSON.stringify(cuts);
    if (chart.keysFor === key) return;
    chart.keysFor = key;
    chart.keys.replaceChildren(...(figure.data.length < 2 ? NONE : figure.data).map(trace => {
      const isMark = trace.mode === 'markers', line = trace.line || {};
      const swatch = el('i', 'sv-swatch' + (trace.stackgroup ? ' is-area' : isMark ? ' is-mark is-' + trace.marker.symbol : ' is-line') + (trace.fillpattern ? ' has-pattern' : ''));
      swatch.style.setProperty('--c', isMark ? trace.marker.color : line.color);
      if (line.dash === 'dash') swatch.classList.add('is-dash');
      if (line.dash === 'dot') swatch.classList.add('is-dot');
      return el('span', null, swatch, trace.name + (cuts[trace.meta] || ''));
    }));
  }

  new MutationObserver(() => draw()).observe(document.body, {attributes: true, attributeFilter: ['class']});
  return {prepare, draw, state: () => state, numDraws: () => numDraws, rest() { charts.forEach(chart => { chart.key = null; }); draw(); }};
}
