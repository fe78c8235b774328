// Saving the run and opening a saved one, in the browser alone. A broken file leaves the present view untouched.
function makeFiles(host) {
  const chooser = set(el('input'), {type: 'file', accept: '.json,application/json', hidden: ''});
  chooser.onchange = () => { if (chooser.files[0]) open(chooser.files[0]); chooser.value = ''; };

  function save() {
    const url = URL.createObjectURL(new Blob([JSON.stringify(host.run.file())], {type: 'application/json'}));
    const link = set(el('a'), {href: url, download: 'specviz-trace.json'});
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  function open(file) {
    if (file.size > MAX_BYTES) return host.complain(say(WORDS.tooLarge, {n: (file.size / 1e6).toFixed(1)}) + WORDS.stay);
    const reader = new FileReader();
    reader.onerror = () => host.complain(WORDS.unreadable + WORDS.stay);
    reader.onload = () => {
      let data;
      try { data = parseTrace(reader.result); } catch (error) { return host.complain(error.message + WORDS.stay); }
      host.show(data, 'file:' + file.name + ':' + Date.now(), {status: say(WORDS.opened, {name: file.name})});
    };
    reader.readAsText(file);
  }
  return {nodes: [host.button('', WORDS.save, save), host.button('', WORDS.open, () => chooser.click()), chooser], open};
}
