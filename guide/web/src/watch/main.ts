/** The page of one's own runs: `anybatch watch`. It is drawn in the browser, since nothing of it is known beforehand. */
import { mount } from "svelte";

import { guide } from "../data/guide.svelte";
import Watch from "./Watch.svelte";
import "../tokens.css";
import "../base.css";

const target = document.querySelector("#page");
if (!target) throw new Error("the page has no element #page");
guide.ready = true; // controls wait for it on pages that are there before their scripts
mount(Watch, { target });
