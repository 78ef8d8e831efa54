// What a picker's widgets lack by themselves: names and roles for screen readers, arrow keys, and
// that keys pressed in it are not taken by the notebook (there, x cuts the cell and an arrow leaves
// it). Where a front end does not run this, everything can still be reached with Tab and Space.
(function (root) {
  if (!root || root.nbaccelDressed) return;
  root.nbaccelDressed = true;

  const set = (element, name, value) => {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  };
  const isOn = (button) => button.classList.contains("mod-active");
  const choices = (group) => [...group.querySelectorAll("button:not(.nbaccel-hidden)")];

  const dressGroup = (group) => {
    const label = group.parentElement.querySelector(".nbaccel-label");
    const buttons = choices(group);
    const usable = buttons.filter((button) => !button.disabled);
    const entry = usable.find(isOn) || usable[0];
    set(group, "role", "radiogroup");
    if (label) set(group, "aria-label", label.textContent);
    for (const button of buttons) {
      set(button, "role", "radio");
      set(button, "aria-checked", String(isOn(button)));
      set(button, "tabindex", button === entry ? "0" : "-1");
    }
  };

  const dress = () => {
    root.querySelectorAll(".nbaccel-options").forEach(dressGroup);
    for (const button of root.querySelectorAll("button.nbaccel-opens")) {
      set(button, "aria-expanded", String(isOn(button)));
    }
  };

  const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const walk = (button, step) => {
    const usable = choices(button.closest(".nbaccel-options")).filter((one) => !one.disabled);
    const next = usable[(usable.indexOf(button) + step + usable.length) % usable.length];
    next.focus();
    if (!isOn(next)) next.click();
  };

  const isForOthers = (event) =>
    event.ctrlKey || event.metaKey || event.altKey || event.key === "Escape" ||
    (event.key === "Enter" && event.shiftKey);

  // Notebook 7 looks at keys before any element of its page does, and leaves those alone that are
  // pressed in an element with this attribute.
  const guard = (event) => {
    event.target.toggleAttribute("data-lm-suppress-shortcuts", !isForOthers(event));
  };
  root.addEventListener("focusin", () => window.addEventListener("keydown", guard, true));
  root.addEventListener("focusout", () => window.removeEventListener("keydown", guard, true));

  root.addEventListener("keydown", (event) => {
    if (isForOthers(event)) return;
    event.stopPropagation();
    const button = event.target.closest(".nbaccel-options button");
    if (button && event.key in STEPS) {
      event.preventDefault();
      walk(button, STEPS[event.key]);
    }
  });

  // JupyterLab says whether its theme is dark; elsewhere what is behind the form does.
  const isDark = () => {
    const named = document.body.dataset.jpThemeLight;
    if (named) return named === "false";
    for (let e = root; e; e = e.parentElement) {
      const [r, g, b, alpha = 1] = getComputedStyle(e).backgroundColor.match(/[\d.]+/g).map(Number);
      if (alpha > 0.5) return 0.3 * r + 0.6 * g + 0.1 * b < 128;
    }
    return false;
  };
  const followTheme = () => root.classList.toggle("nbaccel-dark", isDark());
  for (const named of [document.documentElement, document.body]) {
    new MutationObserver(followTheme).observe(named, { attributes: true });
  }
  followTheme();

  // In narrow windows the line that says whether it fits stays at the top of what scrolls. Boxes
  // around it that hide what is too large, and do not scroll, would keep it from that.
  const scrolls = (element) =>
    /auto|scroll/.test(getComputedStyle(element).overflowY) && element.scrollHeight > element.clientHeight + 1;
  const ENDS = ".jp-Notebook, .jp-mod-outputsScrolled, #notebook";
  for (let e = root.parentElement; e && !e.matches(ENDS) && !scrolls(e); e = e.parentElement) {
    if (getComputedStyle(e).overflowY !== "visible") e.style.overflow = "clip";
  }

  new MutationObserver(dress).observe(root, {
    subtree: true,
    childList: true,
    attributes: true,
    attributeFilter: ["class", "disabled"],
  });
  dress();
})(this.closest(".nbaccel-picker"));
