"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const make = (name, css, words) => {
    const element = document.createElement(name);
    if (css) element.className = css;
    if (words !== undefined) element.textContent = words;
    return element;
  };

  // One tab stop for a group of things; the arrow keys walk them.
  const walkable = (group, items) => {
    if (!items.length) return;
    items.forEach((item, i) => item.setAttribute("tabindex", i ? "-1" : "0"));
    const to = (from, key) => ({
      ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Home: 0, End: items.length - 1,
    })[key];
    group.onkeydown = (event) => {
      const from = items.indexOf(document.activeElement), next = to(from, event.key);
      if (from < 0 || next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const item = items[Math.max(0, Math.min(items.length - 1, next))];
      items[from].setAttribute("tabindex", "-1");
      item.setAttribute("tabindex", "0");
      item.focus();
    };
  };

  // What a mark says, beside it.
  const tip = $("tip");
  const show = (mark) => {
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const at = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const left = at.left + at.width / 2 - own.width / 2;
    const above = at.top - own.height - 8;
    tip.style.left = `${Math.max(6, Math.min(left, document.documentElement.clientWidth - own.width - 6))}px`;
    tip.style.top = `${above > 6 ? above : at.bottom + 8}px`;
  };
  const hide = () => { tip.hidden = true; };
  const marked = (event) => event.target.closest && event.target.closest("[data-tip]");
  for (const kind of ["pointerover", "focusin"]) {
    document.addEventListener(kind, (event) => { const mark = marked(event); if (mark) show(mark); else if (kind === "pointerover") hide(); });
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  window.addEventListener("scroll", hide, { passive: true, capture: true });
  document.querySelectorAll("svg.chart").forEach((svg) => walkable(svg, [...svg.querySelectorAll(".mark")]));

  // Copy buttons; where the clipboard is closed to files, the text is selected instead.
  document.querySelectorAll("[data-copy]").forEach((button) => {
    button.addEventListener("click", async () => {
      const source = $(button.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  });

  // A comparison's legend: one run brought forward.
  document.querySelectorAll("[data-run]").forEach((button) => {
    button.addEventListener("click", () => {
      const chosen = button.getAttribute("aria-pressed") === "true" ? null : button.dataset.run;
      document.querySelectorAll("[data-run]").forEach((other) => other.setAttribute("aria-pressed", String(other === button && !!chosen)));
      document.querySelectorAll("svg.chart").forEach((svg) => {
        const own = chosen ? svg.querySelectorAll(`.${chosen}`) : [];
        svg.classList.toggle("one", own.length > 0);
        svg.querySelectorAll(".forward").forEach((element) => element.classList.remove("forward"));
        own.forEach((element) => element.classList.add("forward"));
      });
    });
  });

  // One generation.
  if (!$("timeline")) return;
  const data = JSON.parse($("timeline").textContent);
  const piece = (token) => data.pieces[token] || `⟨${token}⟩`;
  const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const quoted = (tokens) => tokens.map((token) => `“${visible(piece(token))}”`).join(" ");

  const code = (token) => { // its leading spaces apart, so that no line strikes them out
    const text = visible(piece(token)), bare = text.trimStart(), element = make("code");
    element.append(text.slice(0, text.length - bare.length), make("span", "bare", bare));
    return element;
  };

  const tokenSpan = (token, origin) => {
    const text = piece(token), span = make("span", `token ${origin}`);
    span.textContent = text.includes("\n") ? text.replace(/\n/g, "↵\n") : text;
    return span;
  };

  const stepSpan = (step, number) => {
    const [path, tokens, , , next] = step, drafted = path.map((node) => tokens[node - 1]);
    const span = make("span", "step"), rejected = tokens.length - path.length;
    drafted.forEach((token) => span.append(tokenSpan(token, "t-draft")));
    span.append(tokenSpan(next, tokens.length ? "t-bonus" : "t-plain"));
    const kept = drafted.length ? `${quoted(drafted)} drafted and accepted, ` : "";
    const last = `${quoted([next])} ${tokens.length ? "bonus" : "plain"}`;
    span.setAttribute("role", "button");
    span.setAttribute("aria-label", `Step ${number}: ${kept}${last}, ${plural(rejected, "drafted token")} not kept`);
    span.addEventListener("pointerover", () => describe(step, number, span));
    span.addEventListener("focus", () => describe(step, number, span));
    span.addEventListener("click", () => span.focus());
    return span;
  };

  const describe = (step, number, span) => {
    const [path, tokens, parents, scores, next, ms] = step, panel = $("step");
    document.querySelectorAll(".step.on").forEach((other) => other.classList.remove("on"));
    if (span) span.classList.add("on");
    const emitted = `${path.length + 1} emitted`, head = make("h3", "", `Step ${number}`);
    const list = make("ul", "branches"), children = new Map(), kept = new Set([0, ...path]);
    parents.forEach((parent, i) => children.set(parent, [...(children.get(parent) || []), i + 1]));
    const rows = [];
    const walk = (node, depth) => (children.get(node) || []).forEach((child) => { rows.push([child, depth]); walk(child, depth + 1); });
    walk(0, 0);
    rows.slice(0, 48).forEach(([node, depth]) => {
      const state = kept.has(node) ? "kept" : kept.has(parents[node - 1]) ? "rejected" : "unreached";
      const item = make("li", state), score = scores[node - 1];
      item.style.setProperty("--depth", Math.min(depth, 10));
      item.append(make("span", "sign", { kept: "✓", rejected: "✗", unreached: "·" }[state]));
      item.append(make("span", "unseen", `depth ${depth + 1}, ${state}: `));
      item.append(code(tokens[node - 1]));
      item.append(make("span", "score", score === null ? "" : score.toFixed(2)));
      list.append(item);
    });
    const bonus = make("p", "last");
    bonus.append(make("code", tokens.length ? "t-bonus" : "t-plain", visible(piece(next))), ` ${tokens.length ? "bonus: the target's own" : "plain, nothing was drafted"}`);
    const said = make("p", "note", `${emitted}, ${tokens.length} drafted, ${ms} ms`);
    panel.replaceChildren(head, said, list, bonus);
    if (rows.length > 48) list.append(make("li", "more", `${rows.length - 48} more`));
    if (tokens.length) panel.append(make("p", "note", "✓ kept, ✗ rejected, · never reached; the number is the draft's cumulative log-probability."));
  };

  const draw = (answer) => {
    const tokens = $("tokens"), steps = answer.steps.map((step, i) => stepSpan(step, i + 1));
    const first = make("span", "first");
    answer.first.forEach((token) => first.append(tokenSpan(token, "t-plain")));
    tokens.replaceChildren(first, ...steps);
    if (answer.steps.length < answer.count) tokens.append(make("span", "more", ` … ${answer.count - answer.steps.length} more steps are in trace.jsonl`));
    walkable(tokens, steps);
    $("prompt").textContent = answer.prompt;
    $("step").replaceChildren(make("p", "note", "No step was needed."));
    const telling = answer.steps.findIndex(([path]) => path.length > 1);
    const shown = Math.max(telling, 0);
    if (steps.length) describe(answer.steps[shown], shown + 1, steps[shown]);
  };

  data.answers.forEach((answer, i) => {
    const length = answer.length === null ? "" : `, accepted length ${answer.length.toFixed(2)}`;
    const turn = answer.turn ? `, turn ${answer.turn + 1}` : "";
    $("answer").append(new Option(`${answer.id}${turn}: ${answer.kind}, ${plural(answer.count, "step")}${length}`, i));
  });
  $("answer").addEventListener("change", () => draw(data.answers[$("answer").value]));
  draw(data.answers[0]);
})();
