(globalThis.parts ??= new Map()).set("far", () => "</script>".length);
