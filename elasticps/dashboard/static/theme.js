// Before the first paint: the colours that were chosen here last, else the system's.
const chosen = localStorage.getItem("theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
