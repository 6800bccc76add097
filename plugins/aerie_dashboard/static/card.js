// The card on Airflow's first page. Airflow shares its React; the card's content is a page of the dashboard.
(() => {
  const card = new URL("../card", import.meta.url).pathname;
  globalThis.Aerie = globalThis.AirflowPlugin = () =>
    globalThis.React.createElement("iframe", {
      src: card,
      title: "Aerie: the last run",
      style: { border: 0, width: "100%", height: 132, borderRadius: 8, display: "block" },
    });
})();
