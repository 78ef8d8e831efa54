// Part of a running panel's HTML; Jupyter runs it where it trusts the notebook.
//
// It puts a Stop button where the words about stopping are. Where a page was reloaded, or opened
// elsewhere, nothing renews the panel that it has from the file: then this asks the Jupyter server
// for the kernel's messages, and renews it from these, to the summary at the end.
((place, kernelId) => {
  const server = serverOf(document);
  const isPanel = `.nbaccel-panel[data-place="${place}"]`;
  let panel = document.currentScript?.closest(isPanel) ?? document.querySelector(isPanel);
  if (!server || !panel) return;
  // What is to outlast this panel, which is replaced once a second.
  const run = ((window.nbaccelRuns ??= {})[place] ??= { isOpen: {} });
  const kernelUrl = `${server.baseUrl}api/kernels/${kernelId}`;
  const GIVEN_S = 2.5; // a page that launched the run is given a new panel once a second
  const AGAIN_S = 5;

  // In sight while the output below it is scrolled, if the window is high enough for both.
  if (!document.getElementById("nbaccel-panel-style")) {
    const style = document.createElement("style");
    style.id = "nbaccel-panel-style";
    style.textContent = `
      .nbaccel-panel { border: 1px solid rgba(128,128,128,0.3); border-radius: 6px;
        padding: 0.3em 0.8em; max-width: 100%; box-sizing: border-box; }
      .nbaccel-stop { background: #d32f2f; color: white; border: none; border-radius: 3px;
        padding: 0.35em 0.9em; font: inherit; cursor: pointer; }
      .nbaccel-stop:focus-visible { outline: 2px solid currentColor; outline-offset: 2px; }
      @media (min-height: 36em) {
        .jp-OutputArea:has(> .jp-OutputArea-child .nbaccel-panel) { overflow: visible; min-width: 0; }
        .jp-OutputArea-child:has(.nbaccel-panel) { position: sticky; top: 0; z-index: 2;
          overflow: visible; background: var(--jp-layout-color0, Canvas); }
      }`;
    document.head.append(style);
  }
  equip();
  setTimeout(() => panel.parentNode && follow(), GIVEN_S * 1000);

  function serverOf(page) {
    const config = page.getElementById("jupyter-config-data");
    if (config) return JSON.parse(config.textContent);
    const baseUrl = page.body.dataset.baseUrl; // Notebook 6
    return baseUrl ? { baseUrl } : null;
  }

  function ask(url, method = "GET") {
    const token = document.cookie.match(/(?:^|; )_xsrf=([^;]*)/)?.[1];
    const headers = token ? { "X-XSRFToken": token } : {};
    if (server.token) headers.Authorization = `token ${server.token}`;
    return fetch(url, { method, headers, cache: "no-store" });
  }

  // The button, and what was unfolded before the panel was replaced.
  function equip() {
    for (const fold of panel.querySelectorAll("details")) {
      // Without numbers: "3 messages" are 4 a second later.
      const name = fold.querySelector("summary").textContent.replace(/[\d,]+/g, "");
      fold.open = run.isOpen[name] ?? fold.open;
      fold.addEventListener("toggle", () => { run.isOpen[name] = fold.open; });
    }
    const words = panel.querySelector(".nbaccel-stop-words");
    if (!words) return;
    const button = document.createElement("button");
    button.className = "nbaccel-stop";
    button.title = "Interrupts all ranks, as interrupting the cell does. Pressed again, it ends them at once.";
    const label = () => {
      button.textContent = run.isStopping ? "■ Stopping… press again to end at once" : "■ Stop";
    };
    const press = () => {
      run.isStopping = true;
      label();
      ask(`${kernelUrl}/interrupt`, "POST")
        .then((answer) => { if (!answer.ok) throw new Error(answer.statusText); })
        .catch(() => say("The Jupyter server did not take it: interrupt the cell (■)."));
    };
    // Not at the end of a click: the panel may have been replaced meanwhile, and the button with it.
    button.addEventListener("pointerdown", (event) => { if (event.button === 0) press(); });
    button.addEventListener("click", (event) => { if (event.detail === 0) press(); }); // by keys
    button.addEventListener("focus", () => { run.hasFocus = true; });
    button.addEventListener("blur", () => setTimeout(() => { if (button.isConnected) run.hasFocus = false; }));
    label();
    words.replaceChildren(button);
    if (run.hasFocus) button.focus({ preventScroll: true });
  }

  // Where the button was.
  function say(text) {
    panel.querySelector(".nbaccel-stop-words")?.replaceChildren(text);
  }

  function sayLost(text) {
    say(`${text} This is what was known of it on ${panel.dataset.seen}.`);
  }

  async function follow() {
    if (!panel.parentNode) return;
    const answer = await ask(kernelUrl).catch(() => null);
    if (answer?.status === 404) return sayLost("The kernel of this run has ended.");
    if (!answer?.ok) {
      sayLost("The Jupyter server does not answer.");
      return void setTimeout(follow, AGAIN_S * 1000);
    }
    const session = `nbaccel-${Math.random().toString(36).slice(2)}`;
    const url = new URL(`${kernelUrl}/channels?session_id=${session}`, location.href);
    url.protocol = url.protocol.replace("http", "ws");
    if (server.token) url.searchParams.set("token", server.token);
    const socket = new WebSocket(url);
    let isOver = false;
    const end = () => { isOver = true; socket.close(); };
    // Answered when the kernel is free, that is when the run is over.
    socket.onopen = () => socket.send(JSON.stringify({
      channel: "shell", parent_header: {}, metadata: {}, buffers: [],
      header: { msg_id: `${session}-1`, msg_type: "comm_open", session, username: "", version: "5.3",
        date: new Date().toISOString() },
      content: { comm_id: session, target_name: "nbaccel.run", data: { place } },
    }));
    socket.onclose = () => { if (!isOver) setTimeout(follow, AGAIN_S * 1000); };
    socket.onmessage = ({ data }) => {
      if (!panel.parentNode) return end(); // the cell has another output by now
      if (typeof data !== "string") return;
      const { header, content } = JSON.parse(data);
      if (header.msg_type === "update_display_data" && content.transient?.display_id === place) {
        replace(content.data["text/html"]);
      } else if ((header.msg_type === "comm_close" && content.comm_id === session)
          || (header.msg_type === "status" && /^(re)?start|dead/.test(content.execution_state))) {
        sayLost("The kernel has been restarted since this run.");
        end();
      }
      if (!panel.matches(isPanel)) end();
    };
  }

  function replace(html) {
    const holder = document.createElement("template");
    holder.innerHTML = html;
    const renewed = holder.content.firstElementChild;
    panel.replaceWith(renewed);
    panel = renewed;
    if (panel.matches(isPanel)) equip();
  }
})
