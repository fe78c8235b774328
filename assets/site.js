// The static site: hands the viewer its recordings and lessons, which stand in scripts because a page opened by double click may not fetch.
// It knows file names, nothing of what is in them.
const delivered = new Map(), awaited = new Map();
window.specvizData = (name, data) => {
  delivered.set(name, data);
  if (awaited.has(name)) awaited.get(name)(data);
};

function library(name) {
  if (delivered.has(name)) return Promise.resolve(delivered.get(name));
  return new Promise((resolve, reject) => {
    const script = document.createElement('script');
    awaited.set(name, resolve);
    script.src = 'data/' + encodeURIComponent(name) + '.js';
    script.onload = script.onerror = () => {
      awaited.delete(name);
      script.remove();
      if (!delivered.has(name)) reject(new Error('the recorded run “' + name + '” is not here'));
    };
    document.head.append(script);
  });
}

addEventListener('DOMContentLoaded', () => {
  const runs = delivered.get('runs'), name = runs.length ? runs[0].name : '', trace = delivered.get(name);
  const first = trace ? {type: 'trace', run: 'recorded:' + name, seq: 0, trace, name, status: 'recorded: ' + (trace.meta.title || name)} : null;
  const viewer = SpecViz.open(first, {library, lazyCharts: true, alone: false}), {host} = viewer, menu = document.getElementById('site-runs');
  window.viewer = viewer;
  for (const run of [{name: '', title: 'Recorded runs …'}, ...runs]) menu.append(Object.assign(document.createElement('option'), {value: run.name, textContent: run.title}));
  const complain = error => host.complain(error.message), choose = () => {
    const shown = host.message().name;
    menu.value = runs.some(run => run.name === shown) ? shown : '';
  };
  menu.onchange = () => { if (!menu.value) return; host.lesson.end(); host.showRecording(menu.value).then(() => host.openView('tokens'), complain); };
  host.hear(what => { if (what === 'run') choose(); });
  choose();
  document.getElementById('site-learn').onclick = () => { host.lesson.end(); host.openView('learn'); };
  document.getElementById('site-theme').onclick = () => document.body.classList.toggle('dark');
  setTimeout(() => host.course().then(course => { if (!host.message().formulas) host.dress(course.look); }, complain), 0);      // once the text is there
});
