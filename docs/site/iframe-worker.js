// Browsers start no worker from a file: a page that is opened from a folder searches in a frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => this.onmessage?.({ data });
      this.loaded = new Promise((done) => {
        const script = inner.document.createElement("script");
        script.src = url;
        script.onload = done;
        inner.document.body.append(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.onmessage?.({ data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
