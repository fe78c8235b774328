// Projector mode: the viewer alone, large and in high contrast, for the back row. It knows nothing of what is shown.
WORDS.projector = {on: 'Projector mode', off: 'Leave projector mode', said: 'Projector mode. Press p or Escape to leave.', title: 'Large type for a projector (p)'};
WORDS.help.groups[0][1].push(['p', 'projector mode: large and alone']);

EXTRAS.push(host => {
  const {root} = host, words = WORDS.projector;
  const button = set(host.button('sv-projector', words.on, () => host.projector(!root.classList.contains('projector'))), {'aria-pressed': false,
      title: words.title});
  host.foot.append(button);
  const leave = host.button('sv-icon sv-projector-leave', words.off, () => host.projector(false), 'close');
  root.append(leave);
  host.projector = isOn => {
    if (isOn === root.classList.contains('projector')) return;
    root.classList.toggle('projector', isOn);
    document.documentElement.classList.toggle('sv-projecting', isOn);
    set(button, {'aria-pressed': isOn});
    button.textContent = isOn ? words.off : words.on;
    if (isOn && root.requestFullscreen) root.requestFullscreen().catch(() => {});      // refused in frames; the page's own size will do
    else if (!isOn && document.fullscreenElement === root) document.exitFullscreen();
    if (isOn) host.announce(words.said);
    dispatchEvent(new Event('resize'));      // charts measure themselves again
    host.tell('view');
  };
  root.addEventListener('fullscreenchange', () => { if (!document.fullscreenElement) host.projector(false); });
  document.addEventListener('keydown', event => {
    if (!isForViewer(event, root)) return;
    if (event.key === 'p') { event.preventDefault(); host.projector(!root.classList.contains('projector')); }
    else if (event.key === 'Escape' && !host.hint && root.classList.contains('projector')) { event.preventDefault(); event.stopImmediatePropagation();
        host.projector(false); }
  }, true);
});
