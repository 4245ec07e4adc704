// A person at the page of a timeline: zooms, moves, asks, and writes down what the page says.
const found = [];
function fire(kind, x, y, more) {
  const at = canvas.getBoundingClientRect(), where = { clientX: at.left + x, clientY: at.top + y, bubbles: true, ...more };
  canvas.dispatchEvent(new (kind === "wheel" ? WheelEvent : kind === "dblclick" ? MouseEvent : PointerEvent)(kind, where));
}
const click = (x, y) => { fire("pointerdown", x, y); fire("pointerup", x, y); };
const note = () => found.push({ first, last, told: told.textContent });
note();
const event = panels[1].events.find(event => event[2] && !event.isInside), [x, y, w, h] = box(panels[1], event);
fire("wheel", x, y, { deltaY: -1 }); note();
fire("pointerdown", x, y); fire("pointermove", x - 100, y); fire("pointerup", x - 100, y); note();
fire("dblclick", x, y); note();
click(x + w / 2, y + h / 2); note();
const pixel = pen.getImageData((x + w / 2) * devicePixelRatio, (y + 2) * devicePixelRatio, 1, 1).data;
click(2, 2); note();
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify({ found, chosen: event, pixel: Array.from(pixel), legend: legend.textContent });
document.body.append(out);
