// What the page gets: the global SpecViz.

function style(css) {         // once per page
  if (document.getElementById('specviz-style')) return;
  const node = el('style', null, css);
  node.id = 'specviz-style';
  document.head.append(node);
}

global.SpecViz = {mount, style, parseTrace, open: openPage, exportPage, WORDS, Recorded};
