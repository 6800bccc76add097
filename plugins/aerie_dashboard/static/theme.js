// The theme is Airflow's own: its UI keeps "light", "dark" or "system" under "theme". Runs before the page is drawn.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = window.localStorage.getItem("theme");
    const theme = chosen === "light" || chosen === "dark" ? chosen : dark.matches ? "dark" : "light";
    if (document.documentElement.dataset.theme === theme) return;
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new CustomEvent("aerie:theme"));
  };
  apply();
  dark.addEventListener("change", apply);
  window.addEventListener("storage", apply); // Airflow's page, which this one stands in, changed it
})();
