// Links to Airflow leave its frame. Runs before the page is drawn: no click comes too early.
(() => {
  const framed = window.parent !== window;

  // The frame may not navigate the page that it stands in; a link of that page may.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-airflow]");
    if (!framed || !link) return;
    event.preventDefault();
    const outside = window.parent.document.createElement("a");
    outside.href = link.href;
    if (event.ctrlKey || event.metaKey || event.button === 1) outside.target = "_blank";
    outside.click();
  });
})();
