// The viewer's look for new steps, and the keys of its token lens. A page reads without this file.
"use strict";
// What a link, a chart or a part that opens is called, within its run; the same on a page that is read again.
const nameOf = (e) => [e.closest("section")?.ariaLabel, e.className, e.getAttribute("href") ?? e.closest("figure, details")?.firstElementChild.textContent].join();
if (document.body.dataset.live) {
  let seen = document.body.dataset.seen;  // the state that the page was made of, or an older one
  const look = async () => {
    try {
      const state = await fetch(document.body.dataset.live), now = await state.text();
      if (!state.ok) return;  // an error of the viewer: the next look tries again
      if (now !== seen) {
        const page = await fetch(location.href);
        if (!page.ok) return;
        const main = new DOMParser().parseFromString(await page.text(), "text/html").querySelector("main");
        const old = document.querySelector("main"), all = (page, what) => [...page.querySelectorAll(what)];
        const twin = (e) => e && all(main, e.tagName).find((each) => nameOf(each) === nameOf(e));
        for (const box of all(old, ".chart")) {
          box.plot?.destroy();
          Object.assign(twin(box) ?? {}, { at: box.at, chosen: box.chosen });
        }
        for (const each of all(old, "details[open]")) Object.assign(twin(each) ?? {}, { open: true });
        const held = old.contains(document.activeElement) && twin(document.activeElement);
        old.replaceWith(main);
        drawCharts();
        if (held) held.focus({ preventScroll: true });
      }
      seen = now;
    } catch { /* the viewer has ended: what is shown stays */ }
    finally { setTimeout(look, 2000); }
  };
  setTimeout(look, 2000);
}

const lens = document.querySelector(".tokens");
if (lens) {
  const { columns, rows } = JSON.parse(document.getElementById("token-data").textContent);
  const spans = lens.querySelectorAll("span"), detail = document.getElementById("token");
  let at = -1;
  const select = (i) => {
    if (i < 0 || i >= spans.length) return;
    if (at >= 0) spans[at].classList.remove("at");
    spans[(at = i)].classList.add("at");
    spans[at].scrollIntoView({ block: "nearest" });
    detail.textContent = columns.map((name, c) => `${name} ${rows[i][c] ?? "–"}`).join(" · ");
  };
  lens.addEventListener("click", (event) => select([...spans].indexOf(event.target)));
  lens.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move) return;
    select(Math.min(spans.length - 1, Math.max(0, at + move)));
    event.preventDefault();
  });
}
