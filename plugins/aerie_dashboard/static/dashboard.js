// What pages do by themselves: copy, refresh while a run is running, and count how old their figures are.
(() => {
  // <button data-copy="text">: says for a moment whether it was copied.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button || button.dataset.said) return;
    button.dataset.said = button.textContent;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "copied";
    } catch {
      button.textContent = "not copied";
    }
    window.setTimeout(() => {
      button.textContent = button.dataset.said;
      delete button.dataset.said;
    }, 1200);
  });

  // <div data-refresh="seconds" data-source="url">: the part that is fetched again until the answer has no data-refresh.
  const keepOpen = (part) =>
    [...part.querySelectorAll("details")].map((one, index) => [index, one.open]).filter(([, open]) => open);

  const refresh = async (part) => {
    const status = document.querySelector("[data-live]");
    try {
      const answer = await fetch(part.dataset.source, { headers: { Accept: "text/html" }, credentials: "same-origin" });
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      const made = document.createElement("template");
      made.innerHTML = await answer.text();
      const next = made.content.firstElementChild;
      const open = keepOpen(part);
      const focused = document.activeElement?.id;
      part.replaceWith(next);
      const details = next.querySelectorAll("details");
      open.forEach(([index]) => details[index]?.setAttribute("open", ""));
      if (focused) document.getElementById(focused)?.focus();
      document.dispatchEvent(new CustomEvent("aerie:content"));
      watch(next);
    } catch (error) {
      if (status) status.textContent = `not refreshed: ${error.message}; trying again`;
      part.dataset.failed = "true";
      watch(part);
    }
  };

  const watch = (part) => {
    if (part?.dataset.refresh) window.setTimeout(() => refresh(part), Number(part.dataset.refresh) * 1000);
  };

  document.querySelectorAll("[data-refresh]").forEach(watch);

  // How old the figures are, counted on.
  window.setInterval(() => {
    const shown = document.querySelector("[data-age]");
    if (!shown) return;
    const seconds = Math.max(0, Math.round((Date.now() - Date.parse(shown.dateTime)) / 1000));
    shown.textContent = seconds < 60 ? `${seconds} s ago` : `${Math.floor(seconds / 60)} min ago`;
  }, 1000);
})();
