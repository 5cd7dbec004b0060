// In: the words of a user. Out: the conversation with the model of this address, as it is generated.
// Does not keep anything after the page is closed, but for the token, which stays as long as the tab is open.
"use strict";

const at = (id) => document.getElementById(id);
const TOKEN = "codescent-token";
let model = null;      // as /v1/models describes it
let messages = [];     // of a chat
let text = "";         // of a model without a template: all that is written so far
let unread = 0;        // messages at the beginning, or characters, for which the context has no room
let running = null;    // what stops the answer that is being written

function headers() {
  const token = at("token").value.trim();
  const found = { "content-type": "application/json" };
  if (token) found.authorization = `Bearer ${token}`;
  return found;
}

function say(problem) {
  at("problem").textContent = problem;
  at("problem").hidden = !problem;
}

async function problemOf(response) {
  try {
    const { message, code } = (await response.json()).error;
    return { message, code };
  } catch {
    return { message: `${response.status} ${response.statusText}`, code: null };
  }
}

async function open_() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (response.status === 401) {
    document.querySelector("details").open = true;
    at("token").focus();
    throw new Error("This address asks for a token: write it into the settings.");
  }
  if (!response.ok) throw new Error((await problemOf(response)).message);
  model = (await response.json()).data[0];
  document.title = model.id;
  at("model").textContent = model.id;
  const chats = model.can.includes("chat");
  const does = chats ? "a chat model" : model.can.includes("completions") ? "continues your text" : "gives embeddings only";
  at("most").value = Math.min(256, Math.floor(model.max_model_len / 2));
  at("facts").textContent = `${model.which && `${model.which}, `}${does}, ${model.max_model_len} tokens at most`;
  for (const one of document.querySelectorAll(".chat-only")) one.hidden = !chats;
  if (!model.can.includes("completions")) at("send").disabled = true;
}

function show(role, words) {
  const article = document.createElement("article");
  article.className = model.can.includes("chat") ? role : `${role} continued`;
  if (model.can.includes("chat")) {
    const title = document.createElement("h2");
    title.textContent = role === "user" ? "You" : model.id;
    article.append(title);
  }
  const body = document.createElement("span");
  body.textContent = words;
  article.append(body);
  at("talk").append(article);
  scrollTo(0, document.body.scrollHeight);
  return { article, body };
}

// Adds to an answer. Who has scrolled up to read stays there.
function grow(body, words) {
  const isAtEnd = innerHeight + scrollY >= document.body.scrollHeight - 40;
  body.textContent = words;
  if (isAtEnd) scrollTo(0, document.body.scrollHeight);
}

function asked(words) {
  const common = {
    model: model.id,
    stream: true,
    temperature: Number(at("temperature").value),
    top_p: Number(at("top_p").value),
    max_tokens: Number(at("most").value),
  };
  if (!model.can.includes("chat")) return ["/v1/completions", { ...common, prompt: text.slice(unread) + words }];
  const system = at("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return ["/v1/chat/completions", { ...common, messages: [...first, ...messages.slice(unread), { role: "user", content: words }] }];
}

// Each event of a stream of server-sent events, as JSON. Throws if the stream ends before [DONE].
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection was closed before the answer was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Leaves out the oldest two messages, or half of the text. Returns whether there was something to leave out.
function leaveOut() {
  const chats = model.can.includes("chat");
  const length = chats ? messages.length : text.length;
  if (unread >= length) return false;
  unread += chats ? 2 : Math.ceil((length - unread) / 2);
  if (!chats && /^[\uDC00-\uDFFF]/.test(text.slice(unread))) unread += 1;  // the second half of a character
  return true;
}

// The answer to words; old messages are left out where the context has no room for them.
async function answered(words) {
  const before = unread;
  for (;;) {
    const [path, body] = asked(words);
    const response = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (response.ok) return response;
    const { message, code } = await problemOf(response);
    if (code !== "context_length_exceeded" || !leaveOut()) {
      unread = before;
      throw new Error(message);
    }
  }
}

function note(article, words) {
  const small = document.createElement("small");
  small.textContent = words;
  article.append(small);
}

async function send(words) {
  const mine = show("user", words);
  const theirs = show("assistant", "");
  let answer = "", why = null;
  running = new AbortController();
  busy(true);
  say("");
  try {
    const response = await answered(words);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        answer += (choice.delta ? choice.delta.content : choice.text) || "";
        why = choice.finish_reason || why;
      }
      grow(theirs.body, answer);
    }
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
    if (!answer) {  // nothing was said: the words can be sent again
      mine.article.remove();
      theirs.article.remove();
      at("words").value ||= words;
      return;
    }
  } finally {
    running = null;
    busy(false);
  }
  if (model.can.includes("chat")) {
    if (why === "length") note(theirs.article, "(ended by the largest number of tokens)");
    if (unread) note(theirs.article, `(the first ${unread} messages have no room in the context, and were not read)`);
  }
  messages.push({ role: "user", content: words }, { role: "assistant", content: answer });
  text += words + answer;
}

function busy(is) {
  at("send").disabled = is;
  at("reset").disabled = is;
  at("stop").hidden = !is;
}

at("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = at("words").value;
  if (running || !words.trim()) return;
  if (!at("settings").checkValidity()) {
    document.querySelector("details").open = true;  // else the browser cannot point at the field
    at("settings").reportValidity();
    return;
  }
  try {
    if (!model) await open_();
  } catch (error) {
    return say(error.message);
  }
  at("words").value = "";
  await send(words);
  at("words").focus();
});
at("words").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running && running.abort());
at("reset").addEventListener("click", () => {
  messages = [];
  text = "";
  unread = 0;
  at("talk").replaceChildren();
  say("");
  at("words").focus();
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("token").value = sessionStorage.getItem(TOKEN) || "";
at("token").addEventListener("change", () => {
  sessionStorage.setItem(TOKEN, at("token").value.trim());
  say("");
  open_().catch((error) => say(error.message));
});
open_().catch((error) => say(error.message));
