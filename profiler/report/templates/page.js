const copies = (button, text) => button.addEventListener("click", () => {
  const area = document.createElement("textarea");
  area.value = text();
  document.body.append(area);
  area.select();
  if (document.execCommand("copy")) button.textContent = "copied";
  area.remove();
});
copies(document.querySelector("button.copy"), () =>
  [...document.querySelector(".sortable").rows].map(row => [...row.cells].map(cell => cell.innerText).join("\t")).join("\n"));
document.querySelectorAll("pre.code").forEach(code => {
  const text = code.textContent, button = document.createElement("button");
  button.className = "copy";
  button.textContent = "copy";
  code.append(button);
  copies(button, () => text);
});
document.querySelectorAll(".sortable th button").forEach((button, column) => {
  const isNumber = button.parentElement.className === "n";
  const value = row => isNumber ? Number(row.cells[column].dataset.sort || -Infinity) : row.cells[column].dataset.sort;
  let down = false;
  button.addEventListener("click", () => {
    const body = document.querySelector(".sortable tbody");
    const rows = [...body.rows].sort((x, y) => (value(x) > value(y)) - (value(x) < value(y)));
    down = !down;
    body.replaceChildren(...(down ? rows : rows.reverse()));
  });
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => each.open = true));
