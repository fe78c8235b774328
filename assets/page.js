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
element.dataset.ready = '1';
//# sourceURL=specviz-page.js
