// Before the first paint: the theme that was chosen here, or the system's.
"use strict";
{
  const chosen = localStorage.getItem("dapo-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
