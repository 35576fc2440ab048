// Shows {columns, rows} as a table of plain text. A row with an id is opened by a click or by Enter.
export default function ({ data, parentElement, setTriggerValue }) {
  const table = parentElement.querySelector("table");
  const shown = JSON.stringify(data);
  if (table.shown === shown) return; // nothing new: hover and focus stay
  table.shown = shown;

  const focused = table.contains(table.getRootNode().activeElement)
    ? table.getRootNode().activeElement.dataset.id
    : undefined;
  table.replaceChildren(head(data.columns), body(data, setTriggerValue));
  table.setAttribute("aria-label", data.label);
  if (focused) table.querySelector(`tr[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function head(columns) {
  const row = document.createElement("tr");
  for (const column of columns) {
    row.append(cell("th", { text: column.label, hint: column.hint }, column));
  }
  const part = document.createElement("thead");
  part.append(row);
  return part;
}

function body({ columns, rows }, setTriggerValue) {
  const part = document.createElement("tbody");
  for (const { id, cells } of rows) {
    const row = document.createElement("tr");
    row.append(...cells.map((content, index) => cell("td", content, columns[index])));
    if (id) makeOpenable(row, id, () => setTriggerValue("opened", id));
    part.append(row);
  }
  return part;
}

function cell(tag, content, column) {
  const element = document.createElement(tag);
  if (column.numeric) element.classList.add("numeric");
  if (column.wide) element.classList.add("wide");
  const text = document.createElement("span");
  text.textContent = content.text;
  if (content.tone) text.className = content.tone;
  if (content.hint) element.title = content.hint;
  element.append(text);
  return element;
}

function makeOpenable(row, id, open) {
  row.dataset.id = id;
  row.tabIndex = 0;
  row.setAttribute("role", "button");
  row.onclick = open;
  row.onkeydown = (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      open();
    }
  };
}
