"use strict";
const EVERY_MS = 2000;

async function look() {
  const main = document.getElementById("live");
  try {
    if (document.hidden) return;
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    main.replaceWith(page.getElementById("live"));
  } catch (error) {
    const at = document.getElementById("at");
    at.className = "stale";
    at.textContent = `${at.textContent.split(";")[0]}; no answer since then: ${error.message}`;
  } finally {
    setTimeout(look, EVERY_MS);
  }
}

setTimeout(look, EVERY_MS);
