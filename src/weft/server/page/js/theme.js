// Sets the chosen theme before the first paint; without a choice the system's counts.
const chosen = localStorage.getItem("weft-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
