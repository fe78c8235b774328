// The keys, one press away: "?" or the button in the foot opens the list, Escape closes it. It knows the keys as words only.
WORDS.help = {button: 'Keys', title: 'Keys', close: 'Close', groups: [
  ['Everywhere', [['← →', 'the step before, the next step'], ['Home End', 'the first step, the last step'], ['Space', 'play and pause'],
    ['Enter', 'to the details of the step'], ['Esc', 'close what is open; then back to live'], ['?', 'this list']]],
  ['Why and Tree', [['↓ ↑', 'the next phase, the phase before: draft, verify, accept or reject, emit; then the next step']]],
  ['On the tabs', [['← →', 'the view before, the next view']]],
  ['On a node of the tree', [['← →', 'its parent, its accepted or first child'], ['↓ ↑', 'the next node, the node before'],
      ['Home End', 'the root, the last node']]],
]};

EXTRAS.push(host => {
  const words = WORDS.help, dialog = set(el('dialog', 'sv-help'), {'aria-label': words.title}),
      close = host.button('sv-icon', words.close, () => dialog.close(), 'close');
  const key = text => text.split(' ').map(one => el('kbd', null, one));
  dialog.append(box('sv-help-head', el('h3', null, words.title), close), ...words.groups.map(([title, rows]) => box('sv-help-group',
      el('h4', null, title),
      el('dl', null, ...rows.flatMap(([keys, text]) => [el('dt', null, ...key(keys)), el('dd', null, text)])))));
  dialog.addEventListener('click', event => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener('keydown', event => event.stopPropagation());
  const open = () => { if (!dialog.open) dialog.showModal(); };
  host.root.append(dialog);
  host.foot.append(host.button('sv-keys-button', words.button, open));
  document.addEventListener('keydown', event => {
    if (event.key !== '?' || event.ctrlKey || event.metaKey || event.altKey || !host.root.isConnected
        || event.target.closest && event.target.closest(
        'input:not([type=range], [type=checkbox]), textarea, select, [contenteditable]')) return;
    event.preventDefault();
    if (dialog.open) dialog.close(); else open();
  });
});
