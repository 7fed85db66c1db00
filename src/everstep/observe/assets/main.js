// A file of its own has its run in it. Served by `everstep ui`, the page asks for what it shows.
function start() {
  const data = JSON.parse(byId("data").textContent);
  byId("data").textContent = "";
  if (data !== null) {
    const page = new RunPage(null);
    byId("main").replaceChildren(page.root);
    page.update(data);
  } else {
    live();
  }
}
