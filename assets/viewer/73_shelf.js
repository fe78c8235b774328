// The runs that views can set side by side: the one on the screen, earlier ones of this page, recordings of the library, opened files.
WORDS.shelf = {now: 'On the screen', page: 'Earlier on this page', recorded: 'Recorded runs', file: 'Open a file …', speculative: 'with drafts', plain: 'plain decoding',
  choose: 'Choose a run …', k: 'K\u00a0{k}', depth: 'depth {k}', missing: 'This recording could not be read: {why}'};
const MAX_SHELF = 24;

const nameOf = x => isObject(x) ? x.name || x.label || x.id : x;
const isPlainRun = run => run.steps.length > 0 && !run.numDrafted && run.meta.method !== undefined && nameOf(run.meta.method) === 'plain';
function methodName(run) {
  const {meta} = run, k = isObject(meta.config) && finite(meta.config.k) && meta.config.k;
  return [String(meta.method_label || nameOf(meta.method) || WORDS.shelf.speculative), k && say(WORDS.shelf.k, {k})].filter(Boolean).join(', ');
}
function promptOf(run) {
  const {prompt} = run.meta, last = Array.isArray(prompt) && prompt.filter(message => isObject(message) && message.role === 'user').pop();
  return last ? String(last.content) : typeof prompt === 'string' ? prompt : '';
}
const clipped = (text, n) => { const line = Array.from(text.replace(/\s+/g, ' ').trim()); return line.length > n ? line.slice(0, n - 1).join('') + '…' : line.join(''); };
const runTitle = run => [methodName(run), run.meta.title || clipped(promptOf(run), 32)].filter(Boolean).join(' · ');
function machineOf(run) {
  const {machine} = run.meta, config = isObject(run.meta.config) ? run.meta.config : {};
  const own = isObject(machine) ? [machine.system, machine.processor, finite(machine.cores) && machine.cores + (machine.cores === 1 ? ' core' : ' cores')] : [];
  return [config.device, ...own].filter(part => part && typeof part === 'string').join(', ');
}
const quantizationOf = run => isObject(run.meta.config) ? run.meta.config.quantization : '';
function setupOf(run) {       // what a race must name besides the method
  return [nameOf(run.meta.target), run.meta.drafter && '+ ' + nameOf(run.meta.drafter), quantizationOf(run), machineOf(run)].filter(Boolean).join(' · ');
}

function runOf(data, id) {    // a checked trace file as a run
  const run = new Run(id, data.meta);
  run.plain = (data.plain || []).slice();
  for (const step of data.steps) run.addStep(step);
  run.stats = data.stats || null; run.compare = data.compare || null;
  run.reason = data.meta.reason || '';
  return run;
}

EXTRAS.push(host => {
  const runs = new Map(), recorded = new Map(), ears = [];
  let last = host.run, names = null;
  const shelf = host.shelf = {
    add(run) {
      runs.delete(run.id);
      runs.set(run.id, run);
      while (runs.size > MAX_SHELF) runs.delete(runs.keys().next().value);
      ears.forEach(ear => ear());
    },
    runs: () => [...runs.values()].filter(run => run !== host.run),
    names() {                 // of the library's recordings; they come later, and `hear` tells
      if (!names) {
        names = [];
        if (host.course) host.course().then(course => { names = course.runs; ears.forEach(ear => ear()); }, () => { names = null; });
      }
      return names;
    },
    hear: ear => ears.push(ear),
    async recording(name) {
      if (!recorded.has(name)) recorded.set(name, runOf(checkTrace(await host.fetch(name)), 'recorded:' + name));
      return recorded.get(name);
    },
    open(then) {              // a file from the disk; `then` gets its run
      const chooser = set(el('input'), {type: 'file', accept: '.json,application/json'});
      chooser.onchange = async () => {
        const file = chooser.files[0];
        if (!file) return;
        try {
          if (file.size > MAX_BYTES) throw new Error(say(WORDS.tooLarge, {n: (file.size / 1e6).toFixed(1)}));
          const data = parseTrace(await file.text()), run = runOf(data, 'file:' + file.name);
          run.meta = {title: file.name.replace(/\.json$/, ''), ...run.meta};
          shelf.add(run);
          then(run);
        } catch (error) { host.complain(error.message); }
      };
      chooser.click();
      return chooser;
    },
  };
  host.hear(what => {
    if (what !== 'run' || host.run === last) return;
    if (last.numDecode) shelf.add(last);
    last = host.run;
    ears.forEach(ear => ear());
  });
});

function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], {type})), link = set(el('a'), {href: url, download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
