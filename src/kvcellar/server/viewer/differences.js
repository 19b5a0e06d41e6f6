// What differs between two texts that stand side by side, marked word by word.

const MOST_PAIRS = 4e6; // of words that are held against each other

export function markDifferences(left, right) {
  const [a, b] = [wordsOf(left), wordsOf(right)];
  const isSame = inCommon(a.map(({ text }) => text), b.map(({ text }) => text));
  mark(a.filter((_, i) => !isSame[0][i]));
  mark(b.filter((_, i) => !isSame[1][i]));
}

function wordsOf(root) {
  const found = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest("math, .tex, button, .by, h3, summary")) continue;
    for (const { 0: text, index } of node.data.matchAll(/\S+/g)) found.push({ node, text, start: index, stop: index + text.length });
  }
  return found;
}

// For each word of both whether it is in the longest run of words, with gaps, that both have.
function inCommon(a, b) {
  const same = [new Uint8Array(a.length), new Uint8Array(b.length)];
  let [start, n, m] = [0, a.length, b.length];
  const keep = (i, j) => { same[0][i] = same[1][j] = 1; };
  while (start < n && start < m && a[start] === b[start]) { keep(start, start); start += 1; }
  while (n > start && m > start && a[n - 1] === b[m - 1]) keep(--n, --m);
  const [rows, columns] = [n - start, m - start];
  if (rows * columns > MOST_PAIRS) return same; // all between the same beginning and end is taken to differ
  const width = columns + 1;
  const longest = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i -= 1) {
    for (let j = columns - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[start + i] === b[start + j]
        ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (a[start + i] === b[start + j]) keep(start + i++, start + j++);
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return same;
}

// Words that follow each other in one node get one mark; the last first, so that places stay what they are.
function mark(words) {
  const spans = [];
  for (const word of words) {
    const last = spans.at(-1);
    if (last?.node === word.node && !/\S/.test(word.node.data.slice(last.stop, word.start))) last.stop = word.stop;
    else spans.push({ ...word });
  }
  for (const { node, start, stop } of spans.reverse()) {
    const range = document.createRange();
    range.setStart(node, start);
    range.setEnd(node, stop);
    range.surroundContents(document.createElement("mark"));
  }
}
