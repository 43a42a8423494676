/** Reads a pasted loop, without running it: what `anybatch check --loop` would lack, and the command to run. */

export interface Pasted {
  /** The parameters that the judge fills, with their roles. */
  roles: [name: string, role: string][];
  /** What is missing, as sentences; empty if the judge can run the loop. */
  missing: string[];
  command: string | undefined;
  /** The lines that make the Trainer of the file exact; undefined if the file has a loop of its own. */
  exact?: string;
}

const LOOP = "def train(model, loader, optimizer, accumulation_steps):";

/** Read the text of a file; `patterns` are the judge's names of parameters by role. */
export function readLoop(text: string, file: string, patterns: Readonly<Record<string, string>>): Pasted {
  const code = text.replace(/("""|''')[\s\S]*?\1/g, '""').replace(/#.*$/gm, "");
  const trainer = /^[ \t]*(?:(\w+) *= *)?(?:\w+\.)*\w*Trainer\(/m.exec(code);
  if (trainer && !/\.backward\(/.test(code)) {
    const name = trainer[1] ?? "trainer";
    return { roles: [], missing: [], command: undefined, exact: `import anybatch as ab\n\n${name} = ab.exact(${name})\n${name}.train()` };
  }
  const functions = code.split(/^(?=(?:async +)?def )/m).flatMap((body) => {
    const [head, name = ""] = /^def +(\w+) *\(/.exec(body) ?? [];
    return head === undefined ? [] : [{ name, body, trains: /\.backward\(/.test(body), ...readParameters(parametersOf(body.slice(head.length)), patterns) }];
  });
  const loop = functions.toSorted((a, b) => a.missing.length - b.missing.length || Number(b.trains) - Number(a.trains) || b.roles.length - a.roles.length)[0];
  const missing = loop?.missing ?? [`a function at the left margin: put the loop into ${LOOP}`];
  if (!/\.backward\(/.test(code)) missing.push("a call of loss.backward()");
  if (!/\.step\(/.test(code)) missing.push("a call of optimizer.step()");
  const runs = functions.some(({ name }) => new RegExp(`^(?:\\w+ *= *)?${name}\\(`, "m").test(code)) || (loop && /^(?:for|while)\b/m.test(code));
  if (runs) missing.push('if __name__ == "__main__": before the code that runs when the file is imported');
  if (!/^[\w./ -]*\w\.py$/.test(file)) missing.push("a file name such as train.py");
  const iterated = loop?.roles.find(([name, role]) => role === "dataset" && new RegExp(`\\bin +(?:enumerate\\( *)?${name} *[:,)]`).test(loop.body))?.[0];
  if (iterated) missing.push(`the name loader for ${iterated}, because the loop iterates over it`);
  const target = `${file}:${loop?.name}`;
  return { roles: loop?.roles ?? [], missing, command: loop && !missing.length ? `anybatch check --loop ${file.includes(" ") ? `"${target}"` : target}` : undefined };
}

/** The parameters between the opening parenthesis, where the text begins, and the closing one. */
function parametersOf(text: string): string[] {
  const parts = [""];
  let depth = 0;
  for (const sign of text) {
    if (")]}".includes(sign) && depth-- === 0) break;
    if ("([{".includes(sign)) depth += 1;
    if (sign === "," && depth === 0) parts.push("");
    else parts[parts.length - 1] += sign;
  }
  return parts.map((part) => part.trim()).filter(Boolean);
}

/** Roles as the judge assigns them: each once; optional parameters of other names keep their defaults. */
function readParameters(parameters: string[], patterns: Readonly<Record<string, string>>): Pick<Pasted, "roles" | "missing"> {
  const roles: Pasted["roles"] = [];
  const unknown: string[] = [];
  for (const parameter of parameters) {
    const name = /^\w+/.exec(parameter)?.[0];
    if (name === undefined) continue; // *, /, *args, **kwargs
    const optional = /=/.test(parameter.replace(/\[[^\]]*\]/g, ""));
    const role = Object.entries(patterns).find(([, pattern]) => new RegExp(`^(?:${pattern})$`).test(name.toLowerCase()))?.[0];
    if (role !== undefined && !roles.some(([, used]) => used === role) && !(optional && role === "max_steps")) roles.push([name, role]);
    else if (!optional) unknown.push(name);
  }
  const has = (...names: string[]) => roles.some(([, role]) => names.includes(role));
  const missing = unknown.map((name) => `a known name or a default value for the parameter ${name}`);
  if (!has("model")) missing.push("a parameter model");
  if (!has("loader", "dataset", "get_batch")) missing.push("a parameter loader or dataset");
  return { roles, missing };
}

/** The findings in the judge's output: their lines in the file, and the text. */
export function findingsIn(output: string): { lines: number[]; text: string }[] {
  return [...output.matchAll(/^(\w+ \(\S+\.py:([\d, ]+)\))\n((?: {2}.+\n?)+)/gm)].map((match) => ({
    lines: (match[2] ?? "").split(",").map(Number),
    text: `${match[1]}\n${match[3]}`.trimEnd(),
  }));
}
