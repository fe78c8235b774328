// A run as one HTML file that plays anywhere: this very script, the style and the trace, with or without the charts. Made in the browser;
// the page is filled in one pass, so text of a trace never becomes part of the page's own words.
WORDS.exporting = {button: 'Export HTML', withCharts: 'with charts', size: 'adds 4.8 MB', noCharts: 'The charts could not be added: {why}. The file plays without them.',
  status: 'recorded', named: 'recorded: {name}', title: 'specviz: a recorded run'};

const inScript = value => JSON.stringify(value).replace(/</g, '\\u003c').replace(/\u2028/g, '\\u2028').replace(/\u2029/g, '\\u2029');
const filled = parts => PAGE.replace(/\{\{(\w+)\}\}/g, (_, name) => parts[name]);
const scriptNode = text => '<' + 'script>' + text + '<' + '/script>';

function styleText() {        // wherever the page keeps the viewer's style
  const own = document.getElementById('specviz-style');
  if (own) return own.textContent;
  for (const sheet of document.styleSheets) try {
    const rules = [...sheet.cssRules].map(rule => rule.cssText).join('\n');
    if (rules.includes('.sv-strip')) return rules;
  } catch (error) { /* a sheet of another origin */ }
  return '';
}

function exportPage(file, message, plotly) {
  const {formulas, figures} = message, body = {v: 1, type: 'trace', run: 'export', seq: 0, trace: file, formulas,
      status: typeof file.meta.title === 'string' && file.meta.title ? say(WORDS.exporting.named, {name: file.meta.title}) : WORDS.exporting.status,
      ...(plotly ? {figures} : {}), ...(message.note ? {note: message.note} : {})};
  return filled({title: WORDS.exporting.title, style: styleText(), body: '', scripts: [...(plotly ? [plotly] : []), '(' + specviz.toString() + ')(window);',
      'SpecViz.open(' + inScript(body) + ');'].map(scriptNode).join('\n')});
}

// What an exported page does with its own trace; also the beginning of the static site.
function openPage(message, options) {
  const dark = matchMedia('(prefers-color-scheme: dark)'), follow = () => document.body.classList.toggle('dark', dark.matches);
  follow();
  dark.addEventListener('change', follow);
  const viewer = mount(document.getElementById('viewer'), {alone: true, ...options});
  if (message) viewer.take(message);
  return viewer;
}

// On a slow line nobody waits for a chart library of 4.8 MB: with `lazyCharts` it is loaded once a chart's place comes into sight.
function wanted(host, place) {
  if (!host.options.lazyCharts || !global.IntersectionObserver) return Promise.resolve();
  return new Promise(resolve => new IntersectionObserver((entries, watch) => {
    if (entries.some(entry => entry.isIntersecting)) { watch.disconnect(); resolve(); }
  }).observe(place));
}

EXTRAS.push(host => {
  const words = WORDS.exporting, charts = set(el('input'), {type: 'checkbox'});
  async function plotlyText() {
    const {plotly, figures} = host.message();
    if (!plotly || !figures) throw new Error(WORDS.notLoaded);
    const answer = await fetch(plotly), text = answer.ok ? await answer.text() : '';
    if (!text || /<\/script|<!-{2}/i.test(text)) throw new Error(WORDS.notPlotly);
    return text;
  }
  async function save() {
    let plotly = null;
    host.complain('');
    if (charts.checked) try { plotly = await plotlyText(); } catch (error) { host.complain(say(words.noCharts, {why: error.message})); }
    const url = URL.createObjectURL(new Blob([exportPage(host.run.file(), host.message(), plotly)], {type: 'text/html'}));
    const link = set(el('a'), {href: url, download: 'specviz-run.html'});
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
  const button = host.button('sv-export', words.button, save), option = set(el('label', 'sv-quiet sv-export-charts', charts, words.withCharts),
      {title: words.size});
  host.foot.append(button, option);
  const draw = () => { button.disabled = !host.size(); option.hidden = !host.message().figures || location.protocol === 'file:'; };
  host.hear(draw);
  draw();
});
