// Questions to the server, and its answers.

// A route with its parameters; those that are empty are left out.
export function address(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  const text = query.toString();
  return `/api/${path}${text ? `?${text}` : ""}`;
}

async function request(where, body, signal) {
  const asked = body === undefined ? {} : {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body),
  };
  let answer;
  try {
    answer = await fetch(where, { ...asked, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; is dapo ui still running?");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Error(told.error ?? `the server answered ${answer.status}`);
}

export const ask = async (where, body, signal) => (await request(where, body, signal)).json();

// The events of a stream, one by one.
export async function* events(where, body, signal) {
  const answer = await request(where, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
  }
}
