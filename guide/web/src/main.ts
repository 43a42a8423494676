/** Hydrate the pre-rendered page; during development, render it. */
import { hydrate, mount } from "svelte";

import App from "./App.svelte";
import "./tokens.css";
import "./base.css";

const target = document.querySelector("#page");
if (!target) throw new Error("the page has no element #page");
if (target.childElementCount) hydrate(App, { target });
else mount(App, { target });
