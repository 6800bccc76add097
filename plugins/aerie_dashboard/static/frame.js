// Links to Airflow, and to a tab of their own, leave its frame. Runs before the page is drawn: no click comes too early.
(() => {
  const framed = window.parent !== window;

  // The frame may neither navigate the page that it stands in nor open another; a link of that page may.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-airflow]");
    if (!framed || !link) return;
    event.preventDefault();
    const outside = window.parent.document.createElement("a");
    outside.href = link.href;
    outside.rel = link.rel;
    outside.target = event.ctrlKey || event.metaKey || event.button === 1 ? "_blank" : link.target;
    outside.click();
  });
})();
