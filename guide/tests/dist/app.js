const live = document.querySelector('meta[name="anybatch-guide"]').content === "live";
const names = [...document.querySelectorAll('script[type="application/json"]')].map((one) => one.id).sort();
const parts = globalThis.parts ?? new Map();
const far = async () => {
  if (!parts.has("far")) await import("./parts/far.js");
  document.body.dataset.far = String(globalThis.parts.get("far")());
};
far();
const closing = "</script><!--<script>";
document.getElementById("said").textContent = [live ? "live" : "static", ...names, closing.length].join(" ");
if (live) {
  const source = new EventSource("/api/events");
  source.addEventListener("status", (event) => {
    document.getElementById("said").dataset.status = event.data;
  });
}
