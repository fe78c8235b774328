// The four phases of a step as buttons with one sentence. It knows which phase is shown, not what a phase draws.
function makePhases(host) {
  const buttons = PHASES.map((name, i) => {
    const one = set(el('button', 'sv-phase-step', el('i', 'sv-num', String(i + 1)), WORDS.phaseNames[name]),
        {type: 'button', 'data-phase': name});
    one.onclick = () => host.setPhase(i);
    return one;
  });
  const back = host.button('sv-icon', WORDS.phaseBack, () => host.setPhase(host.view.phase - 1), 'up'),
      on = host.button('sv-icon', WORDS.phaseOn, () => host.setPhase(host.view.phase + 1), 'down'), text = el('div', 'sv-phase-text');
  const node = box('sv-phases', set(box('sv-phase-steps', ...buttons), {role: 'group', 'aria-label': WORDS.phasesLabel}),
      box('sv-phase-move', back, on), text);
  function draw() {
    const {run, view} = host, step = run.steps[view.at];
    buttons.forEach((one, i) => { set(one, {'aria-current': i === view.phase ? 'step' : 'false'});
        one.classList.toggle('is-past', i < view.phase);
        one.disabled = !step; });
    back.disabled = on.disabled = !step;
    text.textContent = step ? phaseText(step, run, view.phase) : '';
  }
  return {node, draw};
}
