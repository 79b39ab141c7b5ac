  const model = (name) => Bokeh.documents.map((each) => each.get_model_by_name(name)).find(Boolean);
  const zoom = (by) => {
    const range = model("timeline-range"), whole = data.end, size = range.end - range.start;
    let start = range.start, end = range.end;
    if (by === "in") [start, end] = [start + size / 4, end - size / 4];
    else if (by === "out") [start, end] = [start - size / 2, end + size / 2];
    else if (by === "left") [start, end] = [start - size / 2, end - size / 2];
    else if (by === "right") [start, end] = [start + size / 2, end + size / 2];
    const shift = Math.max(0, -start) - Math.max(0, end - whole);
    if (by === "whole" || end - start >= whole) [start, end] = [0, whole];
    else [start, end] = [start + shift, end + shift];
    range.setv({ start, end });
  };
  for (const button of all("[data-zoom] button")) button.addEventListener("click", () => zoom(button.dataset.by));

  // A finger scrolls the page; only two zoom.
  const calm = () => {
    for (const each of Bokeh.documents) for (const root of each.roots()) root.toolbar.active_drag = null;
  };
  if (document.querySelector("[data-zoom]") && matchMedia("(pointer: coarse)").matches) {
    const wait = () => (Bokeh.documents.length ? calm() : setTimeout(wait, 50));
    wait();
  }
