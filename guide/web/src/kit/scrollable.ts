/** Make an element focusable, for scrolling with keys, only while it overflows. */
import type { Attachment } from "svelte/attachments";

export function scrollable(name: () => string): Attachment<HTMLElement> {
  return (element) => {
    const look = () => {
      const wider = element.scrollWidth > element.clientWidth + 1;
      if (wider) {
        element.tabIndex = 0;
        element.setAttribute("role", "group");
        element.setAttribute("aria-label", `${name()}, can be moved sideways`);
      } else {
        for (const attribute of ["tabindex", "role", "aria-label"]) element.removeAttribute(attribute);
      }
    };
    const watch = new ResizeObserver(look);
    watch.observe(element);
    return () => watch.disconnect();
  };
}
