// Turns every stepper that is still a plain list of frames into one that shows a single frame.
// It may run once for each stepper on a page; the mark `data-ready` makes the second time harmless.
for (const root of document.querySelectorAll(".mie-stepper[id]:not([data-ready])")) {
  const frames = [...root.querySelectorAll(".mie-frame")];
  const controls = root.querySelector(".mie-controls");
  root.dataset.ready = "";
  if (!controls) {
    frames[0].dataset.current = "";
    continue;
  }
  const slider = controls.querySelector("input");
  const [back, forward, play] = controls.querySelectorAll("button");
  const where = controls.querySelector(".mie-where");
  const live = root.querySelector(".mie-live");
  const last = frames.length - 1;
  let now = 0;
  let timer = null;

  const show = (index, speak = true) => {
    now = Math.min(Math.max(index, 0), last);
    frames.forEach((frame, i) => {
      frame.toggleAttribute("data-current", i === now);
      frame.setAttribute("aria-hidden", i !== now);
    });
    const words = frames[now].querySelector(".mie-words");
    const name = words.querySelector("strong").textContent;
    slider.value = now;
    slider.setAttribute("aria-valuetext", `${name}, ${now + 1} of ${last + 1}`);
    where.textContent = `${now + 1} of ${last + 1}`;
    back.disabled = now === 0;
    forward.disabled = now === last;
    if (speak) live.textContent = words.textContent;
  };

  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.setAttribute("aria-pressed", "false");
    play.setAttribute("aria-label", "Play");
  };
  const start = () => {
    if (now === last) show(0);
    play.setAttribute("aria-pressed", "true");
    play.setAttribute("aria-label", "Pause");
    timer = setInterval(() => {
      // A cell that ran again has taken this stepper out of the page.
      if (!root.isConnected) return stop();
      show(now + 1);
      if (now === last) stop();
    }, 900);
  };
  const go = (index) => {
    stop();
    show(index);
  };

  back.addEventListener("click", () => go(now - 1));
  forward.addEventListener("click", () => go(now + 1));
  play.addEventListener("click", () => (timer === null ? start() : stop()));
  slider.addEventListener("input", () => go(Number(slider.value)));
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const target = {
      ArrowLeft: now - 1,
      ArrowRight: now + 1,
      Home: 0,
      End: last,
    }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    go(target);
  });

  controls.hidden = false;
  show(0, false);
}
