/** Split a line of Python into tokens with kinds, for programs that are fetched and not highlighted at build time. */

export interface Token {
  kind: "" | "keyword" | "string" | "comment" | "constant" | "function";
  text: string;
}

const KEYWORDS =
  "and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield";
const TOKENS = new RegExp(
  `(?<comment>#.*$)|(?<string>[rbf]*"""[^]*?(?:"""|$)|[rbf]*"(?:[^"\\\\]|\\\\.)*"|[rbf]*'(?:[^'\\\\]|\\\\.)*')` +
    `|(?<keyword>\\b(?:${KEYWORDS})\\b)|(?<constant>\\b(?:True|False|None|\\d[\\w.]*)\\b)|(?<function>\\b[A-Za-z_]\\w*(?=\\())`,
  "g",
);

/** All lines of a program, each in tokens; a string over several lines is a string on each of them. */
export function coloured(lines: readonly string[]): Token[][] {
  let within = false;
  return lines.map((line) => {
    const quotes = line.match(/"""/g)?.length ?? 0;
    const whole = within || (quotes === 1 && /^\s*[rbf]*"""/.test(line));
    if (quotes % 2) within = !within;
    return whole ? [{ kind: "string", text: line }] : tokens(line);
  });
}

function tokens(line: string): Token[] {
  const found: Token[] = [];
  let end = 0;
  for (const match of line.matchAll(TOKENS)) {
    if (match.index > end) found.push({ kind: "", text: line.slice(end, match.index) });
    const kind = Object.entries(match.groups ?? {}).find(([, text]) => text !== undefined)?.[0] ?? "";
    found.push({ kind: kind as Token["kind"], text: match[0] });
    end = match.index + match[0].length;
  }
  if (end < line.length) found.push({ kind: "", text: line.slice(end) });
  return found;
}
