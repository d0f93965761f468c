"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  document.documentElement.classList.add("js");
  const list = find("cards");
  const cards = list ? Array.from(list.children) : [];
  const table = data.threshold;
  const slider = find("threshold");

  // A sample counts if it strictly beats the threshold, as in the verdict. At the threshold of the test, the
  // flags of the audit decide, because they include samples that only other attacks recover.
  const isBeyond = (card) => {
    if (!table || Number(slider.value) === table.start) return Boolean(card.recovered);
    const score = card.scores[table.metric];
    return score !== null && score !== undefined && table.sign * score > table.sign * table.values[slider.value];
  };

  const valueOf = (index, key) => {
    const card = data.cards[index];
    if (key === "order") return -index;
    return key.startsWith("scores:") ? card.scores[key.slice(7)] : card[key];
  };

  const passesFilters = (card) => {
    const valueOfField = (id) => (find(id) ? find(id).value : "");
    const label = valueOfField("label");
    const certificate = valueOfField("certificate-filter");
    const minConfidence = Number(valueOfField("confidence"));
    if (label !== "" && card.label !== data.labels[label]) return false;
    if (certificate === "none" && card.certificate !== "") return false;
    if (certificate !== "" && certificate !== "none" && card.certificate !== data.certificates[certificate]) return false;
    if (minConfidence > 0 && !(card.confidence >= minConfidence)) return false;
    return !(find("recovered") && find("recovered").checked && !isBeyond(card));
  };

  const arrange = () => {
    const key = find("sort").value;
    const sign = find("direction").getAttribute("aria-pressed") === "true" ? -1 : 1;
    const naturalSign = data.ascending.includes(key) ? -1 : 1;
    const order = cards.map((_, i) => i).sort((a, b) => {
      const [u, v] = [valueOf(a, key), valueOf(b, key)];
      if (u === null || u === undefined || v === null || v === undefined) return (u ?? null) === (v ?? null) ? a - b : (u ?? null) === null ? 1 : -1;
      return sign * naturalSign * (v - u) || a - b;
    });
    order.forEach((i) => list.append(cards[i]));
  };

  const batchSize = 24; // cards shown at once, because phones scroll slowly through many cards
  let maxShown = batchSize;
  const filter = () => {
    const badgeText = table && Number(slider.value) !== table.start ? "beyond threshold" : "beyond chance";
    let count = 0;
    Array.from(list.children).forEach((element) => {
      const card = data.cards[element.dataset.card];
      const isPassing = passesFilters(card);
      count += isPassing ? 1 : 0;
      element.hidden = !isPassing || count > maxShown;
      element.querySelector(".badge").hidden = !isBeyond(card);
      element.querySelector(".badge span").textContent = badgeText;
    });
    const hiddenCount = Math.max(count - maxShown, 0);
    find("more").hidden = hiddenCount === 0;
    find("more").textContent = `Show ${Math.min(hiddenCount, batchSize)} more`;
    const shownText = hiddenCount ? `, the first ${maxShown} shown` : "";
    find("count-shown").textContent = `${count} of ${cards.length} cards${shownText}`;
    find("confidence-value").textContent = Number(find("confidence").value).toFixed(2);
    find("empty").hidden = count > 0;
  };

  const moveRules = (value) => {
    document.querySelectorAll("svg[data-axis]").forEach((chart) => {
      const offset = (value - chart.dataset.value) * chart.dataset.scale;
      chart.querySelector(".rule").setAttribute("transform", chart.dataset.axis === "x" ? `translate(${offset} 0)` : `translate(0 ${offset})`);
    });
  };

  const showThreshold = () => {
    const position = Number(slider.value);
    find("count-train").textContent = table.train[position];
    find("count-null").textContent = Number(table.null[position].toPrecision(3));
    find("threshold-value").textContent = table.texts[position];
    slider.setAttribute("aria-valuetext", table.texts[position]);
    find("reset-threshold").disabled = position === table.start;
    find("moved").hidden = position === table.start;
    moveRules(table.values[position]);
    if (cards.length) filter();
  };

  // A link to a folded section or glossary word opens the section or word.
  const unfold = (hash) => {
    const target = hash.length > 1 && document.getElementById(decodeURIComponent(hash.slice(1)));
    const folded = target && (target.closest("details") || target.querySelector("details"));
    if (folded) folded.open = true;
    if (folded) target.scrollIntoView();
  };
  window.addEventListener("hashchange", () => unfold(location.hash));
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link) unfold(link.getAttribute("href"));
    const copy = event.target.closest(".copy");
    if (copy) {
      const code = copy.parentElement.querySelector("code");
      getSelection().selectAllChildren(code);
      navigator.clipboard?.writeText(code.textContent.trim().replace(/\s+/g, " ")).then(() => { copy.textContent = "Copied"; }, () => {});
    }
  });
  unfold(location.hash);

  if (slider) {
    slider.value = table.start; // A browser may restore the position of the slider after a reload.
    slider.addEventListener("input", showThreshold);
    find("reset-threshold").addEventListener("click", () => {
      slider.value = table.start;
      showThreshold();
      slider.focus();
    });
    showThreshold();
  }
  if (cards.length) {
    const controls = find("controls");
    const direction = find("direction");
    controls.reset();
    controls.addEventListener("submit", (event) => event.preventDefault());
    const update = () => {
      maxShown = batchSize;
      arrange();
      filter();
    };
    controls.addEventListener("input", update);
    find("reset-gallery").addEventListener("click", () => {
      controls.reset();
      direction.setAttribute("aria-pressed", "false");
      update();
    });
    direction.addEventListener("click", () => {
      direction.setAttribute("aria-pressed", String(direction.getAttribute("aria-pressed") !== "true"));
      update();
    });
    find("more").addEventListener("click", () => {
      maxShown += batchSize;
      filter();
    });
    update();
  }
})();
