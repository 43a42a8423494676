/** Every component of the kit on one sheet, with made-up numbers: `npm run gallery`. Not part of the page. */
import { mount } from "svelte";

import { guide } from "../../src/data/guide.svelte";
import Gallery from "./Gallery.svelte";
import "../../src/tokens.css";
import "../../src/base.css";

guide.ready = true;
const target = document.querySelector("#page");
if (target) mount(Gallery, { target });
