// No browser starts a worker of a file. Of pages that were opened from the disk the search runs in a hidden frame instead.
// mkdocs-material's plugin `offline` would fetch such a script from a server, but for one of this name in `extra.polyfills`.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      // Written, because Firefox puts another in the place of a frame's first document.
      inner.document.open();
      inner.document.write("<body></body>");
      inner.document.close();
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          Object.assign(script, { src: source, onload: done, onerror: failed });
          inner.document.body.append(script);
        });
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      const started = load(new URL(address, location));
      this.postMessage = async (data) => {
        await started;
        inner.dispatchEvent(new MessageEvent("message", { data }));
      };
    }
  };
}
