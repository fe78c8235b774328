// Which fed token sees which: the ancestor mask of one step as a picture. It knows parents only; a record that fed other tokens says so.
const MOST_ROWS = 160;        // of more fed tokens no picture is drawn
function maskPicture(step, selected, lastText) {
  const nodes = nodesOf(step), n = nodes.length + 1, seen = [];
  nodes.forEach((node, i) => seen.push(new Set([...(node.parent < 0 ? [0] : seen[node.parent]), i + 1])));
  const cell = max(5, min(17, floor(210 / n))), names = [lastText, ...nodes.map(node => node.text)].map(text => shown(text) || '␣'),
      labelled = cell >= 13, left = labelled ? 84 : 2, width = left + n * cell + 2, height = n * cell + 2;
  const picture = svg('svg', {viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', class: 'sv-mask',
      'aria-label': say(WORDS.mask.label, {n, pairs: 1 + seen.reduce((sum, set) => sum + set.size, 0)})});
  for (let r = 0; r < n; r++) {
    const state = r ? nodes[r - 1].state : 'context', isRow = selected !== null && r === selected + 1;
    if (labelled) picture.append(svg('text', {x: left - 6, y: r * cell + cell / 2 + 5, 'text-anchor': 'end',
        class: isRow ? 'is-chosen' : ''},
        Array.from(names[r]).slice(0, 10).join('')));
    for (let c = 0; c < n; c++) {
      const sees = r === 0 ? c === 0 : seen[r - 1].has(c);
      if (!sees && c > r) continue;
      const one = svg('rect', {x: left + c * cell + 0.5, y: r * cell + 1.5, width: cell - 1, height: cell - 1, rx: cell > 9 ? 2.5 : 1,
          class: sees ? 'is-seen is-' + state : 'is-hidden'});
      if (sees) one.append(svg('title', {}, say(WORDS.mask.sees, {a: names[r], b: names[c]})));
      picture.append(one);
    }
    if (isRow) picture.append(svg('rect', {x: left - 0.5, y: r * cell + 0.5, width: (r + 1) * cell + 1, height: cell + 1, rx: 3,
        class: 'is-row'}));
  }
  return picture;
}
