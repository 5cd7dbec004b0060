"use strict";
// Shows one frame at a time. Without this script, and on paper, all frames stand below each other.
(() => {
  const frames = [...document.querySelectorAll(".frame")];
  const bar = document.querySelector(".steps");
  if (frames.length < 2) return;
  const [back, next] = bar.querySelectorAll("[data-move]");
  const all = bar.querySelector("[data-all]");
  const said = bar.querySelector("output");
  const named = frames.findIndex((frame) => `#${frame.id}` === location.hash);
  let at = Math.max(0, named), everything = false;

  function show() {
    document.documentElement.classList.toggle("one", !everything);
    frames.forEach((frame, number) => frame.classList.toggle("shown", number === at));
    all.setAttribute("aria-pressed", String(everything));
    back.disabled = everything || at === 0;
    next.disabled = everything || at === frames.length - 1;
    said.textContent = everything ? "" : `${at + 1} / ${frames.length}`;
  }
  function move(by) {
    if (everything) return;
    at = Math.min(frames.length - 1, Math.max(0, at + by));
    history.replaceState(null, "", `#${frames[at].id}`);
    show();
  }
  back.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  all.addEventListener("click", () => { everything = !everything; show(); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowLeft: -1, PageUp: -1, ArrowRight: 1, PageDown: 1, Home: -frames.length, End: frames.length }[event.key];
    const inside = event.target instanceof Element && event.target.closest(".wide");
    if (by === undefined || (inside && event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    move(by);
  });
  bar.hidden = false;
  show();
})();
