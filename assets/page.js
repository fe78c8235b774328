// The header's buttons: light or dark, and on narrow screens which part of the page is shown. Knows nothing of traces or models.
const root = document.body;
const param = new URLSearchParams(location.search).get('__theme');
const stored = (() => { try { return localStorage.getItem('specviz-theme'); } catch { return null; } })();
if (stored && (!param || param === 'system')) root.classList.toggle('dark', stored === 'dark');
element.querySelector('[data-theme]').addEventListener('click', () => {
  const dark = root.classList.toggle('dark');
  try { localStorage.setItem('specviz-theme', dark ? 'dark' : 'light'); } catch { /* private window: the choice lasts as long as the page */ }
});

const buttons = [...element.querySelectorAll('[data-view]')];
function show(view) {
  root.dataset.view = view;
  for (const button of buttons) if (button.hasAttribute('aria-pressed')) button.setAttribute('aria-pressed', String(button.dataset.view === view));
  window.dispatchEvent(new Event('resize'));          // charts that were hidden have no size yet
}
for (const button of buttons) button.addEventListener('click', () => show(button.dataset.view));
show('tokens');
function open(place) {        // the viewer reads its place from the address
  history.replaceState(history.state, '', location.pathname + location.search + '#view=' + place);
  window.dispatchEvent(new HashChangeEvent('hashchange'));
}
element.querySelector('[data-learn]').addEventListener('click', () => { show('tokens'); open('learn'); });
element.querySelector('[data-view=charts]').addEventListener('click', () => open('tokens'));       // the charts stand under the text
const dialog = () => document.querySelector('#join dialog');
function join(tries = 150) {          // the addresses come with the page's first event: a click before them is kept
  const card = dialog();
  if (card) { if (!card.open) card.showModal(); } else if (tries) setTimeout(join, 100, tries - 1);
}
element.querySelector('[data-join]')?.addEventListener('click', () => join());
document.addEventListener('click', event => {
  const open = dialog();
  if (!open?.open) return;
  if (event.target === open || event.target.closest('[data-join-close]')) open.close();        // the dialog itself is hit beside its card
  const chosen = event.target.closest('[data-join-choice]');
  if (!chosen) return;
  for (const button of open.querySelectorAll('[data-join-choice]')) button.setAttribute('aria-pressed', String(button === chosen));
  for (const panel of open.querySelectorAll('[data-join-panel]')) panel.hidden = panel.dataset.joinPanel !== chosen.dataset.joinChoice;
});
element.dataset.ready = '1';
//# sourceURL=specviz-page.js
