/** The page of `anybatch watch`. It is rendered in the browser, because its data is not known at build time. */
import { mount } from "svelte";

import { guide } from "../data/guide.svelte";
import Watch from "./Watch.svelte";
import "../tokens.css";
import "../base.css";

const target = document.querySelector("#page");
if (!target) throw new Error("the page has no element #page");
guide.ready = true; // enables controls, which pre-rendered pages disable until scripts run
mount(Watch, { target });
