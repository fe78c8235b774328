// Colours the answers in the chat by how their tokens came about. It changes no node: the browser paints ranges of the text that is
// there (CSS Custom Highlight API), so Markdown stays rendered and model text stays text. Knows nothing of where runs come from.
(function (global) {
'use strict';
const ORIGINS = ['draft', 'correction', 'bonus'];      // "plain" tokens stay as they are; styles in page.css
const REACH = 160;                                     // characters that may be skipped to find the next match
const MARKS = '*_`#|~\\';
const SURE = 4;                                        // so many equal characters in a row count as a match
const ENOUGH = 0.6;                                    // a text of which less than this was found is another text: leave it

const supported = () => Boolean(global.CSS && CSS.highlights && global.Highlight);

/* For each character of `shown` its place in `source`, or -1. Both are without white space. Markdown only leaves characters out (marks)
 * and puts few in, so a walk that skips as little as possible is right wherever the texts agree. */
function align(source, shown) {
  const places = new Int32Array(shown.length).fill(-1);
  const same = (s, t) => {                              // marks between the characters of the source do not break a match
    const end = Math.min(t + SURE, shown.length);
    if (t >= end || source[s] !== shown[t]) return false;
    while (t < end && s < source.length) {
      if (source[s] === shown[t]) { s++; t++; } else if (MARKS.includes(source[s])) s++; else return false;
    }
    return t === end;
  };
  let s = 0, t = 0;
  while (t < shown.length && s < source.length) {
    if (source.charCodeAt(s) === shown.charCodeAt(t)) { places[t++] = s++; continue; }
    let found = false;
    for (let skip = 1; skip <= REACH && !found; skip++) {
      for (let left = skip; left >= 0; left--) {        // rather leave marks of the source out than text of the page
        if (same(s + left, t + skip - left)) { s += left; t += skip - left; found = true; break; }
      }
    }
    if (!found) t++;
  }
  return places;
}

/* Ranges by origin for one answer. runs: [[text, origin], ...]; root: the element that shows it. */
function rangesOf(root, runs) {
  let source = '';
  const origins = [];
  for (const [text, origin] of runs) {
    const bare = text.replace(/\s+/g, '');
    source += bare;
    for (let i = 0; i < bare.length; i++) origins.push(origin);
  }
  const nodes = [], offsets = [];
  let shown = '';
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, {acceptNode: node =>
    node.parentElement.closest('button, .katex, .katex-display') ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT});
  while (walker.nextNode()) {
    const text = walker.currentNode.data;
    for (let i = 0; i < text.length; i++) if (!/\s/.test(text[i])) { shown += text[i]; nodes.push(walker.currentNode); offsets.push(i); }
  }
  const places = align(source, shown), found = Object.fromEntries(ORIGINS.map(origin => [origin, []]));
  let first = 0, matched = 0;
  const originAt = i => places[i] < 0 ? '' : origins[places[i]];
  for (let i = 0; i < places.length; i++) {
    if (places[i] >= 0) matched++;
    if (i + 1 < places.length && nodes[i + 1] === nodes[i] && originAt(i + 1) === originAt(i)) continue;
    const origin = originAt(i);
    if (found[origin]) {
      const begin = {startContainer: nodes[first], startOffset: offsets[first]};
      found[origin].push(new StaticRange({...begin, endContainer: nodes[i], endOffset: offsets[i] + 1}));
    }
    first = i + 1;
  }
  return matched >= ENOUGH * places.length ? found : null;
}

/* Paint these answers and nothing else. answers: [{root, runs}]. Returns how many were painted. */
const painted = new WeakMap();                          // root -> {key, ranges}: an answer that did not change is not walked again
function paint(answers) {
  if (!supported()) return 0;
  const all = Object.fromEntries(ORIGINS.map(origin => [origin, []]));
  let count = 0;
  for (const {root, runs} of answers) {
    let known = painted.get(root);
    const fits = known && known.runs === runs && known.text === root.textContent
        && Object.values(known.found || {}).every(ranges => ranges.every(range => range.startContainer.isConnected));
    if (!fits) painted.set(root, known = {runs, text: root.textContent, found: rangesOf(root, runs)});
    if (!known.found) continue;
    count++;
    for (const origin of ORIGINS) all[origin].push(...known.found[origin]);
  }
  for (const origin of ORIGINS) CSS.highlights.set('specviz-' + origin, new Highlight(...all[origin]));
  return count;
}

global.SpecColours = {supported, align, rangesOf, paint};
})(window);
