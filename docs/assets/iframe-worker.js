// Browsers start no worker for a page that is read from the disk. There the search runs in a hidden frame, and speaks as a worker does.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    document.body.append(frame)
    this.frame = frame.contentWindow
    this.frame.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
    const script = frame.contentDocument.createElement("script")
    script.src = url
    this.ready = new Promise(done => script.addEventListener("load", done))
    frame.contentDocument.body.append(script)
  }

  postMessage(data) {
    this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })))
  }
}

if (location.protocol === "file:") window.Worker = window.IFrameWorker = IFrameWorker
