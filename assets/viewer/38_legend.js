// The legend over the text, with the two switches of what the text shows. It knows the names of the states only.
function makeLegend(host) {
  const legend = set(box('sv-legend'), {role: 'list'});
  const toggle = (cls, isOn, label) => {
    const input = set(el('input'), {type: 'checkbox', 'aria-label': label}),
        draw = () => host.root.classList.toggle(cls, input.checked === isOn);
    input.checked = !isOn;
    input.onchange = draw;
    return input;
  };
  for (const kind in WORDS.legend) {
    const isRejected = kind === 'rejected', sample = el('span', 'sv-tok sv-sample is-' + kind, 'Ab');
    legend.append(set(el(isRejected ? 'label' : 'span', 'sv-key', isRejected && toggle('hide-rejected', false, WORDS.showRejected), sample,
        WORDS.legend[kind]), {role: 'listitem'}));
  }
  legend.append(set(el('label', 'sv-key sv-key-space', toggle('show-space', true, WORDS.showSpaceLong), WORDS.showSpace), {role: 'listitem',
      title: WORDS.showSpaceLong}));
  return legend;
}
