// Messages in their order: late ones change nothing, a gap is asked for once and then passed over. It knows nothing of steps or screens.
// sink: {run (getter), begin(message), apply(message), restart(id): a run whose start never came, lost(n), resync(id, from) or null}
function makeStream(sink) {
  const past = new Set();     // runs that this page has left: late messages of theirs change nothing
  const held = new Map();     // messages that came too early, by seq
  let asked = null;

  function leave(old, next) { if (old !== undefined) past.add(old); past.delete(next); held.clear(); asked = null; }

  function take(message) {
    if (!isObject(message) || typeof message.type !== 'string') return;
    const run = sink.run;
    if (message.type === 'resync') return resynced(message);
    if (message.type === 'start' || message.type === 'trace') return sink.begin(message);
    if (message.seq === undefined) return sink.apply(message);
    if (message.run !== run.id) {
      if (!past.has(message.run)) { held.clear(); held.set(message.seq, message); ask(message.run, 0); }
      return;
    }
    if (message.seq <= run.seq) return;
    if (message.seq > run.seq + 1) { held.set(message.seq, message); ask(run.id, run.seq + 1); return; }
    sink.apply(message);
    drain();
  }

  function drain() {
    for (let seq = sink.run.seq + 1; held.has(seq); seq++) { const message = held.get(seq); held.delete(seq); sink.apply(message); }
  }

  function ask(id, from) {    // a gap: fetch what is missing, once; if that fails go on without it and say so
    if (asked) return;
    const question = asked = {id, from}, done = answer => {
      if (asked !== question) return;
      clearTimeout(timer);
      resynced(isObject(answer) ? answer : {messages: answer || []});
    };
    const timer = setTimeout(() => done(null), 5000);
    if (!sink.resync) return done(null);
    Promise.resolve().then(() => sink.resync(id, from)).then(answer => { if (answer !== undefined) done(answer); }, () => done(null));
  }

  function resynced(answer) {
    const question = asked;
    asked = null;
    const waiting = new Map(held);
    for (const message of Array.isArray(answer.messages) ? answer.messages : []) take(message);
    for (const [seq, message] of waiting) if (message.run === sink.run.id && seq > sink.run.seq) held.set(seq, message);
    drain();
    if (!held.size) return;
    if (question && question.id !== sink.run.id) {      // its start is gone for good: show at least the rest
      const kept = new Map(held);
      sink.restart(question.id);
      for (const [seq, message] of kept) held.set(seq, message);
    }
    const run = sink.run, seq = min(...held.keys());
    sink.lost(seq - run.seq - 1);
    run.seq = seq - 1;
    drain();
  }

  return {take, leave, numHeld: () => held.size};
}
