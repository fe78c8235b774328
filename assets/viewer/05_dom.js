// Constants and small helpers: DOM nodes from text (never from markup), numbers as words. They know nothing of steps.
const WINDOW = 40;            // steps shown by the per-step charts
const CHART_MS = 100;         // a chart is redrawn at most every 100 ms ...
const CHART_SHARE = 4;        // ... and charts together leave three quarters of the time to everything else
const MAX_POINTS = 500;       // points of a cumulative line
const MAX_BYTES = 20e6;
const SVG = 'http://www.w3.org/2000/svg';
const NONE = [];
const VIEWS = [];             // {name, title, controls?, charts?, mount(host) → {node, draw?(), leave?()}}: other files push theirs
const EXTRAS = [];            // functions of the host, called once when the viewer stands: deep links, lessons, export
const {max, min, floor, ceil, abs} = Math;
const SPECIAL = /^(<\|[^|>\s]{1,40}\|>|<\/?(s|eos|bos|pad|unk|end_of_turn|start_of_turn|endoftext)>|\[\/?(INST|SEP|CLS|PAD|UNK)\])$/;
const ICONS = {first: 'M5 4v12M16 4 8 10l8 6z', previous: 'M14 4 6 10l8 6z', play: 'M6 3.5v13l10-6.5z',
    pause: 'M6 4h3v12H6zM11 4h3v12h-3z', next: 'M6 4l8 6-8 6z', last: 'M15 4v12M4 4l8 6-8 6z', close: 'M4.5 4.5l11 11M15.5 4.5l-11 11'};

const say = (text, values) => text.replace(/\{(\w+)\}/g, (whole, name) => values && name in values ? String(values[name]) : whole);
const finite = x => typeof x === 'number' && Number.isFinite(x);
const prob = x => !finite(x) ? WORDS.dash : x === 0 || x === 1 ? String(x) : x < 0.001 ? '<.001' : x > 0.999 ? '>.999'
    : x.toFixed(3).replace(/^0/, '');
const ms = x => x >= 100 ? x.toFixed(0) : x.toFixed(1);
const rate = x => x >= 100 ? x.toFixed(0) : x.toFixed(1);
const clamp = x => max(0, min(1, x));

function el(tag, cls, ...children) {          // text goes in as text nodes, never as markup
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  node.append(...children.filter(child => child !== undefined && child !== null && child !== false));
  return node;
}
const box = (cls, ...children) => el('div', cls, ...children);
function set(node, attributes) { for (const key in attributes) node.setAttribute(key, attributes[key]); return node; }
function svg(tag, attributes, ...children) {
  const node = set(document.createElementNS(SVG, tag), attributes);
  node.append(...children);
  return node;
}
function icon(name) {
  return svg('svg', {viewBox: '0 0 20 20', width: 18, height: 18, 'aria-hidden': 'true'},
    svg('path', {d: ICONS[name], fill: 'currentColor', stroke: 'currentColor', 'stroke-width': 1.6, 'stroke-linejoin': 'round'}));
}
