// A draft tree as a picture: tidy, SVG. It knows one step and nothing of the run around it.
const drafterProb = node => finite(node.q) ? node.q : node.q_t1;
const TREE = {column: 132, box: 106, row: 34, height: 26, tall: 52, tallHeight: 42};

const MOST_NODES = 500;       // nodes that are drawn of one step

// Places: column by depth, siblings in their order, each subtree as close to the one above as their outlines allow, a parent in the middle
// of its children (Reingold and Tilford 1981). The text so far is -1, the token behind the drafts 'end'. Lookahead's window stands below,
// each entry under the place in the text that it guesses. folded: what continues a token that was not accepted is counted in `behind`.
function treeLayout(step, threshold, folded) {
  const all = nodesOf(step).slice(0, MOST_NODES), children = new Map([[-1, []]]), place = new Map(), last = closing(step),
      path = min(pathEnd(step), all.length - 1),
      behind = new Map();
  const isOpen = i => !folded || i < 0 || all[i].state === 'accepted';
  const isShown = node => node.state !== 'window' && (isJudged(node) || !(drafterProb(node) < threshold)) && isOpen(node.parent);
  all.forEach((node, i) => { if (isShown(node) && children.has(node.parent)) { children.get(node.parent).push(i); children.set(i, []); } });
  const top = [];             // of a folded node: its visible ancestor
  all.forEach((node, i) => {
    if (node.state === 'window') return;
    top[i] = isOpen(node.parent) ? i : top[node.parent];
    if (top[i] !== i) behind.set(top[i], (behind.get(top[i]) || 0) + 1);
  });
  if (last) { children.get(path).push('end'); children.set('end', []); }

  // outlines: highest and lowest row at each depth, deepest first, seen from the node's own row
  const outline = new Map(), shift = new Map(), nodes = [...(last ? ['end'] : NONE), ...all.keys()].filter(i => children.has(i));
  for (const i of [...(last ? ['end'] : NONE), ...nodes.filter(i => i !== 'end').reverse(), -1]) {
    const inner = children.get(i), high = [], low = [];
    for (const child of inner) {
      const own = outline.get(child), n = own.high.length;
      let by = -Infinity;
      for (let d = 1; d <= min(n, high.length); d++) by = max(by, low[low.length - d] + 1 - own.high[n - d]);
      if (by === -Infinity) by = 0;
      shift.set(child, by);
      while (high.length < n) { high.unshift(Infinity); low.unshift(-Infinity); }
      for (let d = 1; d <= n; d++) {
        const k = high.length - d;
        high[k] = min(high[k], own.high[n - d] + by); low[k] = max(low[k], own.low[n - d] + by);
      }
    }
    const middle = inner.length ? (shift.get(inner[0]) + shift.get(inner[inner.length - 1])) / 2 : 0;
    for (const child of inner) shift.set(child, shift.get(child) - middle);
    outline.set(i, {high: [...high.map(x => x - middle), 0], low: [...low.map(x => x - middle), 0]});
  }
  const first = -min(...outline.get(-1).high), treeRows = first + max(...outline.get(-1).low) + 1, order = [], stack = [[-1, 0, first]];
  let depth = 0, rows = treeRows;
  while (stack.length) {
    const [i, d, row] = stack.pop();
    place.set(i, [d, row]); order.push(i);
    depth = max(depth, d);
    for (const child of children.get(i).slice().reverse()) stack.push([child, d + 1, row + shift.get(child)]);
  }
  const windowFrom = all.findIndex(node => node.state === 'window');
  if (windowFrom >= 0) {      // a comb: the first row is a chain, each further row hangs off the one above
    let width = 1;
    while (windowFrom + width < all.length && all[windowFrom + width].parent === windowFrom + width - 1) width++;
    for (let i = windowFrom; i < all.length; i++) {
      const r = floor((i - windowFrom) / width), d = (i - windowFrom) % width + r + 1;
      place.set(i, [d, treeRows + 1.1 + 1.4 * r]);
      order.push(i);
      depth = max(depth, d); rows = max(rows, treeRows + 2.1 + 1.4 * r);
    }
  }
  const numHidden = nodesOf(step).length - place.size + 1 + (last ? 1 : 0);
  return {place, order, children, rows, depth, treeRows, hasWindow: windowFrom >= 0, numHidden, behind,
      parentOf: i => i === 'end' ? path : all[i].parent};
}

// options: {threshold, probs: show p and q in each box, greedy, root: the text of the last token}
function treePicture(step, layout, options) {
  const all = nodesOf(step), {place, order} = layout, {column: W, box: B} = TREE, H = options.probs ? TREE.tall : TREE.row,
      h = options.probs ? TREE.tallHeight : TREE.height, x = d => d * W + 10, y = r => r * H + 8, last = closing(step);
  const width = layout.depth * W + B + 20, height = layout.rows * H + 12;
  const picture = svg('svg', {viewBox: `0 0 ${width} ${height}`, width, height, role: 'tree',
      'aria-label': say(WORDS.treeLabel, {n: all.length})});
  const stateOf = i => i === -1 ? 'context' : i === 'end' ? last.origin : all[i].state;
  for (const i of order) if (i !== -1) {
    const from = place.get(layout.parentOf(i)) || place.get(-1), [d, r] = place.get(i), x0 = x(from[0]) + B, y0 = y(from[1]) + h / 2,
        x1 = x(d), y1 = y(r) + h / 2;
    const line = stateOf(i) === 'window' && d > 1 && r > layout.treeRows + 1.5
        ? `M${x(from[0]) + B / 2},${y(from[1]) + h} L${x1 + B / 2 - 14},${y1 - h / 2}`
        : `M${x0},${y0} C${x0 + 14},${y0} ${x1 - 14},${y1} ${x1},${y1}`;
    picture.append(svg('path', {class: 'is-' + stateOf(i), 'data-n': i, d: line}));
  }
  if (layout.hasWindow) picture.append(svg('text', {class: 'is-caption', x: x(1), y: y(layout.treeRows + 1.1) - 10},
      WORDS.treeView.window));
  const levels = new Map();
  for (const i of order) {
    const key = i === -1 ? null : layout.parentOf(i);
    if (!levels.has(key)) levels.set(key, []);
    levels.get(key).push(i);
  }
  for (const i of order) {
    const [d, r] = place.get(i), state = stateOf(i), node = typeof i === 'number' ? all[i] : null,
        text = i === -1 ? options.root : i === 'end' ? last.text : node.text;
    const name = shown(text) || (text === '' ? '◦' : '␣'), [p, q] = node ? probsOf(node, options.greedy) : [],
        peers = levels.get(i === -1 ? null : layout.parentOf(i));
    const said = i === -1 ? say(WORDS.treeView.rootSaid, {text: name}) : i === 'end' ? say(WORDS.treeView.endSaid,
        {text: name, origin: WORDS.origins[last.origin]})
        : say(WORDS.treeView.nodeSaid, {text: name, state: WORDS.states[state], p: prob(p), q: prob(q)});
    const group = svg('g', {class: 'is-' + state, role: 'treeitem', tabindex: -1, 'data-n': i, 'aria-level': d + 1, 'aria-label': said,
        'aria-setsize': peers.length, 'aria-posinset': peers.indexOf(i) + 1, 'aria-selected': 'false',
            transform: `translate(${x(d)},${y(r)})`});
    const letters = Array.from(name),
        mark = {accepted: '✓', rejected: '✗', correction: '↻', bonus: '+'}[state], fits = mark ? 10 : 12;
    group.append(svg('title', {}, said), svg('rect', {width: B, height: h, rx: state === 'window' ? 2 : 7}),
        svg('text', {class: 'is-token', x: 9, y: options.probs && node ? 17 : h / 2 + 4.5},
            letters.length > fits ? letters.slice(0, fits - 1).join('') + '…' : name));
    const folded = layout.behind.get(i);
    if (folded) {
      set(group, {'aria-expanded': 'false'});
      group.append(svg('text', {class: 'is-behind', x: B + 6, y: h / 2 + 4.5}, '+' + folded));
    }
    if (mark) group.append(svg('text', {class: 'is-mark', x: B - 9, y: options.probs && node ? 17 : h / 2 + 4.5, 'text-anchor': 'end'},
        mark));
    if (options.probs && node) group.append(svg('text', {class: 'is-p', x: 9, y: 34}, 'p ' + prob(p)),
        svg('text', {class: 'is-q', x: B / 2 + 4, y: 34}, 'q ' + prob(q)));
    picture.append(group);
  }
  return picture;
}
