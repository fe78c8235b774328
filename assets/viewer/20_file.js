
// ---- trace files: checked before anything on the screen changes -----------------------------------------------------
const WORD_SETS = {state: ['accepted', 'rejected', 'unjudged', 'window'], origin: ['draft', 'correction', 'bonus', 'plain'],
    kind: ['prefill', 'spec', 'plain', 'unknown'], source: ['exact', 'inferred', 'aggregate'], why: ['start', 'pays', 'probe', 'off', 'bound']};
const SHAPES = {              // field: type, "!" where it must be there, "?" where null is allowed
  step: {kind: 'kind!', t0_ms: 'time!', draft_ms: 'ms!', verify_ms: 'ms!', other_ms: 'ms!', nodes: '[node', emitted: '[emitted',
      draft_stop: 'text', kv: '{cache', num_rows: 'int', record_ms: 'ms', top: '[top', residual: '[residual',
         source: 'source', num_drafted: 'int?', num_accepted: 'int?', server_ms: 'ms?', num_prompt_tokens: 'int', num_reused: 'int',
         draft_by: 'text', num_pooled: 'int?', rule: 'text', margin: 'number?', disturbed: 'text', choice: '<choice',
         draft_device_ms: 'ms?', verify_device_ms: 'ms?'},
  choice: {k: 'int!', why: 'why!', tokens: 'number', cost: 'number', method: 'text'},
  node: {id: 'int!?', text: 'text!', parent: 'from-1!', state: 'state!', q: 'prob?', p: 'prob?', accept_prob: 'prob?', u: 'prob?',
      p_t1: 'prob?', q_t1: 'prob?', score: 'number?'},
  emitted: {id: 'int!?', text: 'text!', origin: 'origin!', num_tokens: 'int'},
  cache: {before: 'int!', fed: 'int!', after: 'int!'},
  top: {at: 'from-1!', rows: '(int text prob prob?!', temperature_one: 'bool'},
  residual: {at: 'from-1!', rows: '(int text prob!'},
  plain: {id: 'int!?', text: 'text!', t_ms: 'time!', ms: 'ms!', margin: 'number?', disturbed: 'text'},
};
const whole = x => Number.isInteger(x);
const TYPES = {
  int: ['a whole number, at least 0', x => whole(x) && x >= 0], 'from-1': ['a whole number, at least -1', x => whole(x) && x >= -1],
      number: ['a number', finite],
  prob: ['a number from 0 to 1', x => finite(x) && x >= 0 && x <= 1], ms: ['a time in milliseconds', x => finite(x) && x >= 0 && x < 1e12],
  time: ['a time in milliseconds', x => finite(x) && abs(x) < 1e12], text: ['text', x => typeof x === 'string'],
      bool: ['true or false', x => typeof x === 'boolean'],
};
for (const name in WORD_SETS) TYPES[name] = ['one of ' + WORD_SETS[name].join(', '), x => WORD_SETS[name].includes(x)];
const isObject = x => x !== null && typeof x === 'object' && !Array.isArray(x);

function broken(place, given, expected) {
  const text = given === undefined ? WORDS.missing : JSON.stringify(given);
  throw new Error(say(WORDS.broken, {place, given: text.length > 60 ? text.slice(0, 57) + '...' : text, expected}));
}
function checkScalar(type, value, place) {
  const name = type.replace(/[!?]/g, '');
  if (value === null && type.includes('?')) return;
  if (!TYPES[name][1](value)) broken(place, value, TYPES[name][0]);
}
function checkRecord(shape, data, place) {
  if (!isObject(data)) broken(place, data, 'an object');
  for (const name in SHAPES[shape]) {
    const type = SHAPES[shape][name], at = place + '.' + name, value = data[name];
    if (value === undefined) { if (type.includes('!')) broken(at, undefined, 'a value'); continue; }
    if (type[0] === '[') checkList(type.slice(1), value, at);
    else if (type[0] === '{') { if (!isObject(value)) broken(at, value, 'an object');
        for (const key in value) checkRecord(type.slice(1), value[key], at + '.' + key); }
    else if (type[0] === '<') { if (value !== null) checkRecord(type.slice(1), value, at); }
    else if (type[0] === '(') {
      const types = type.slice(1, -1).split(' ');
      if (!Array.isArray(value)) broken(at, value, 'a list');
      value.forEach((row, i) => {
        if (!Array.isArray(row) || row.length !== types.length) broken(at + '[' + i + ']', row, 'a list of ' + types.length);
        row.forEach((cell, k) => checkScalar(types[k], cell, at + '[' + i + '][' + k + ']'));
      });
    } else checkScalar(type, value, at);
  }
}
function checkList(shape, data, place) {
  if (!Array.isArray(data)) broken(place, data, 'a list');
  data.forEach((item, i) => checkRecord(shape, item, place + '[' + i + ']'));
}
function checkSteps(steps, place) {
  checkList('step', steps, place);
  steps.forEach((step, i) => {
    const nodes = nodesOf(step), at = place + '[' + i + ']', taken = new Set();
    nodes.forEach((node, k) => {
      const here = at + '.nodes[' + k + ']';
      if (node.parent >= k) broken(here + '.parent', node.parent, 'a number from -1 to ' + (k - 1));
      const judged = node.state === 'accepted' || node.state === 'rejected';
      if (judged && node.parent >= 0 && nodes[node.parent].state !== 'accepted') broken(here + '.state', node.state,
          'a node that is judged to have an accepted parent');
      if (node.state === 'accepted' && taken.has(node.parent)) broken(here + '.state', node.state,
          'at most one accepted child of each node');
      if (node.state === 'accepted') taken.add(node.parent);
    });
    for (const name of ['top', 'residual']) for (const [k, record] of (step[name] || NONE).entries())
      if (record.at >= nodes.length) broken(at + '.' + name + '[' + k + '].at', record.at, 'a number from -1 to ' + (nodes.length - 1));
  });
}
function checkTrace(data) {   // throws an Error whose message can be shown as it is
  if (!isObject(data) || data.format !== 'specviz-trace') throw new Error(WORDS.notTrace);
  if (data.version !== 1) {
    if (whole(data.version) && data.version > 1) throw new Error(say(WORDS.version, {v: data.version}));
    broken('version', data.version, '1');
  }
  if (!isObject(data.meta)) broken('meta', data.meta, 'an object');
  checkSteps(data.steps, 'steps');
  if (data.plain !== undefined) checkList('plain', data.plain, 'plain');
  for (const name of ['stats', 'compare']) if (data[name] !== undefined && data[name] !== null && !isObject(data[name])) broken(name,
      data[name], 'an object');
  return data;
}
function parseTrace(text) {
  let data;
  try { data = JSON.parse(text.replace(/^\uFEFF/, '')); } catch (error) { throw new Error(WORDS.notJson); }
  return checkTrace(data);
}
